"""Float32 masters for trained weights, cast once per optimizer step.

The registered parameter is the master, so that the optimizer, clipping, DDP, state dicts and checkpoints need no
change. Forwards read a copy in the compute dtype: it has the same name in the module's `__dict__`, which Python looks
up before the registered parameters. The copy is the result of one recorded cast that keeps no tensors, so every
backward may pass through it; its gradient is float32, and micro-batches add up in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer

from upweight.log import warn_once

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels import elementwise
else:
    elementwise = None

HALF_DTYPES = (torch.bfloat16, torch.float16)
CAST_TOGETHER = 1 << 28  # bytes of gradients that may wait for each other before they are cast, as those of an adapter
Sharding = Literal["none", "ddp", "fsdp", "deepspeed"]


@dataclass(frozen=True, eq=False)
class TrainedWeight:
    """A trained parameter: its compute dtype, and every (module, attribute) that holds it."""

    slots: tuple[tuple[nn.Module, str], ...]
    dtype: torch.dtype

    @property
    def parameter(self) -> nn.Parameter:
        module, name = self.slots[0]
        return cast(nn.Parameter, module._parameters[name])


def trained_weights(model: nn.Module, dtype: torch.dtype) -> list[TrainedWeight]:
    """Return the trained parameters of a model that computes in `dtype`; tied ones once, with all their slots."""
    architecture_chose = not isinstance(model, PeftModel) and any(p.dtype in HALF_DTYPES for p in model.parameters())
    slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad and parameter.is_floating_point():
                slots.setdefault(parameter, []).append((module, name))

    def compute_dtype(parameter: nn.Parameter, module: nn.Module, name: str) -> torch.dtype:
        if (copy := vars(module).get(name)) is not None:
            return copy.dtype
        # PEFT keeps adapted embeddings in a ParameterDict and sets `requires_grad_` on what it reads from there.
        if isinstance(module, nn.ParameterDict | nn.ParameterList):
            return torch.float32
        # In a half-precision model, the architecture keeps some weights in float32 (a router, for example).
        return parameter.dtype if parameter.dtype in HALF_DTYPES or architecture_chose else dtype

    return [TrainedWeight(tuple(at), compute_dtype(parameter, *at[0])) for parameter, at in slots.items()]


def set_up_precision(
    model: nn.Module, dtype: torch.dtype, *, sharding: Sharding = "none", pure: bool = False
) -> "ComputeCopies | None":
    """Cast a model to `dtype` with float32 masters of trained weights; None where no copies are kept here."""
    # FSDP2 casts float32 shards by its mixed-precision policy, and DeepSpeed keeps masters itself. Call it when the
    # model is on its device and not yet wrapped: DDP's hooks are lost where a parameter's dtype changes later.
    weights = trained_weights(model, dtype)
    if not any(p.dtype in HALF_DTYPES for p in model.parameters()):
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
    if pure or sharding == "deepspeed":
        for weight in weights:
            weight.parameter.data = weight.parameter.data.to(weight.dtype)
        if pure and any(weight.dtype in HALF_DTYPES for weight in weights):
            warn_once(
                f"{str(dtype).removeprefix('torch.')} weights without float32 masters: at small learning rates most "
                "updates are lost by rounding; `bf16: true` keeps masters"
            )
        return None
    for weight in weights:
        weight.parameter.data = weight.parameter.data.float()
    halves = [weight for weight in weights if weight.dtype in HALF_DTYPES]
    return ComputeCopies(model, halves) if sharding != "fsdp" and halves else None


class ComputeCopies:
    """The compute-dtype copies of a model's float32 masters, refreshed after each step of the optimizers it follows."""

    def __init__(self, model: nn.Module, weights: list[TrainedWeight]) -> None:
        self._weights = weights
        self._copies: list[Tensor] = []
        self._handles: list[Any] = [model.register_load_state_dict_post_hook(lambda *_: self.rebuild())]
        self.rebuild()

    def rebuild(self) -> None:
        """Create every copy again, for masters that were replaced or moved."""
        masters, dtypes = [weight.parameter for weight in self._weights], [weight.dtype for weight in self._weights]
        together = sum(master.numel() * dtype.itemsize for master, dtype in zip(masters, dtypes, strict=True))
        with torch.inference_mode(False), torch.enable_grad():
            if together <= CAST_TOGETHER:
                self._copies = list(cast(tuple[Tensor, ...], _CastTogether.apply(dtypes, *masters)))
            else:
                copies = map(_Cast.apply, masters, dtypes)
                self._copies = [cast(Tensor, copy) for copy in copies]
        for weight, copy in zip(self._weights, self._copies, strict=True):
            for module, name in weight.slots:
                vars(module)[name] = copy

    def refresh(self) -> None:
        """Write the masters' values into the copies, in place, so that CUDA graphs see the new values."""
        with torch.inference_mode(False), torch.no_grad():
            masters: list[Tensor] = [weight.parameter for weight in self._weights]
            torch._foreach_copy_(self._copies, masters)  # pyright: ignore[reportPrivateImportUsage]

    def follow(self, optimizer: Optimizer) -> None:
        """Refresh now, and after each step of `optimizer` (or accelerate's wrapper of one); call it after wrapping."""
        self.refresh()  # DDP has given every rank the masters of rank 0
        inner = getattr(optimizer, "optimizer", optimizer)
        self._handles.append(inner.register_step_post_hook(lambda *_: self.refresh()))

    def remove(self) -> None:
        """Let the model read its masters again: for merging, copying or tying weights."""
        for handle in self._handles:
            handle.remove()
        for weight in self._weights:
            for module, name in weight.slots:
                vars(module).pop(name, None)
        self._handles, self._copies = [], []


class _Cast(torch.autograd.Function):
    """Casts one weight, and its gradient at the speed of memory."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, dtype: torch.dtype) -> Tensor:
        return master.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (grad,) = grad_outputs
        by_kernel = elementwise is not None and grad.is_cuda and grad.is_contiguous()
        return elementwise.widened(grad) if by_kernel and elementwise else grad.float(), None


class _CastTogether(torch.autograd.Function):
    """Casts many small weights, and the gradients of all that have one, in few launches instead of one for each."""

    @staticmethod
    def forward(ctx: Any, dtypes: list[torch.dtype], *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_cast_all(masters, dtypes))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        present = [number for number, grad in enumerate(grad_outputs) if grad is not None]
        wide = _cast_all([grad_outputs[number] for number in present], [torch.float32] * len(present))
        grads: list[Tensor | None] = [None] * len(grad_outputs)
        for number, grad in zip(present, wide, strict=True):
            grads[number] = grad
        return None, *grads


def _cast_all(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return the tensors in other dtypes."""
    made = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if made:
        torch._foreach_copy_(made, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return made


def computed_weights(model: nn.Module, state_dict: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield a state dict's entries with trained weights in their compute dtype instead of their masters'."""
    copied = {
        (f"{prefix}.{name}" if prefix else name): vars(module)[name].dtype
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        if name in vars(module)
    }
    for name, value in state_dict.items():
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            yield name, value.to(copied.get(name, torch.float32) if copied else dtype)
        else:
            yield name, value
