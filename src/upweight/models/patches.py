"""Patches of transformers, PEFT and accelerate; each has a test that shows when it can be removed."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from upweight.models.modules import context_value, wrap_forward

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels import linear as few_rows
else:
    few_rows = None  # without Triton, products of few rows run through torch


def shard_on_cpu(state: AcceleratorState, plugin: FullyShardedDataParallelPlugin) -> None:
    """Make accelerate shard over CPU ranks, where it silently drops the plugin and uses DDP."""
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Use eager attention for models with a soft cap (Gemma 2), which SDPA drops before transformers 5.21."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")


_lengths_B: ContextVar[Tensor | None] = ContextVar("lengths_B", default=None)


def row_lengths(lengths_B: Tensor) -> AbstractContextManager[None]:
    """Let rotary embeddings that depend on length use the length of each row inside, not that of the widest row."""
    return context_value(_lengths_B, lengths_B)


def scale_rope_by_row_length(model: nn.Module) -> None:
    """Let rotary embeddings depend on the length of each sequence; stock ones take that of the widest row so far."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            wrap_forward(module, _rotary_forward)


def _rotary_forward(self: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the stock forward once for each length."""

    def stock(positions_BN: Tensor) -> Any:
        for name in [name for name in vars(self) if name.endswith("max_seq_len_cached")]:
            setattr(self, name, 0)
        return self.__dict__["_stock_forward"](x, positions_BN, *args, **kwargs)

    lengths_B = _lengths_B.get()
    if lengths_B is None:
        return stock(position_ids)
    lengths, number_B = lengths_B.unique(return_inverse=True)
    parts = [stock(position_ids[..., :1, :].clamp(max=length - 1)) for length in lengths.tolist()]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)[number_B]
    return tuple(torch.cat(part)[number_B] for part in zip(*parts, strict=True))


def add_adapters_in_place(model: nn.Module) -> None:
    """Let plain LoRA layers add their term inside the matrix product; PEFT takes three passes over the output."""
    for module in model.modules():
        if type(module) is LoraLinear:
            wrap_forward(module, _lora_forward)


def _lora_forward(self: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the base layer's output plus the active adapter's term; layers that are not plain run PEFT's forward."""
    plain = None if args or kwargs else plain_adapter(self, x)
    if plain is None:
        return self.__dict__["_stock_forward"](x, *args, **kwargs)
    weight, bias, down, up, scaling = plain
    x_ND = x.reshape(-1, x.shape[-1])
    if few_rows is not None and is_few(x_ND, len(weight)) and len(down) <= few_rows.MOST_RANK:
        out = few_rows.few_rows_linears(x_ND, [weight], [] if bias is None else [bias], [down], [up], [scaling])
    elif torch.compiler.is_compiling():
        out = F.linear(x_ND, weight, bias) + scaling * F.linear(F.linear(x_ND, down), up)
    else:
        out = _LowRankLinear.apply(scaling, bias, x_ND, weight, down, up)
    assert isinstance(out, Tensor)
    return out.view(*x.shape[:-1], out.shape[-1])


def is_few(x_ND: Tensor, width: int) -> bool:
    """Return whether rows are so few that our kernel computes a product of this width faster than torch."""
    if few_rows is None or not is_half_inference(x_ND):
        return False
    return x_ND.shape[0] <= few_rows.most_rows(x_ND.shape[1], width)


def is_half_inference(x_ND: Tensor) -> bool:
    """Return whether rows are on a GPU in half precision without gradients, as in sampling."""
    return x_ND.is_cuda and x_ND.dtype != torch.float32 and not torch.is_grad_enabled()


def plain_adapter(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Return weight, bias, adapter weights and scaling of a layer whose adapter only adds a low-rank product."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or layer.lora_variant or len(active) != 1 or layer.fan_in_fan_out:
        return None
    (name,) = active
    base, down, up, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = all(type(linear) is nn.Linear for linear in (base, down, up)) and up.bias is None
    idle = isinstance(dropout, nn.Identity) or not dropout.training
    if not (plain and idle) or torch.is_autocast_enabled(x.device.type):
        return None
    weights: list[Tensor] = [base.weight, down.weight, up.weight]
    frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    one_dtype = all(type(w) in (Tensor, nn.Parameter) and w.dtype == x.dtype for w in weights)
    if not (frozen and one_dtype):
        return None
    return base.weight, base.bias, down.weight, up.weight, float(layer.scaling[name])


class _LowRankLinear(torch.autograd.Function):
    """x W' + b + s (x A') B' for frozen W and b: the low-rank terms are added by the products themselves."""

    @staticmethod
    def forward(ctx: Any, scaling: float, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        x_ND, weight, down, up = tensors
        narrow = F.linear(x_ND, down)
        out = F.linear(x_ND, weight, bias).addmm_(narrow, up.t(), alpha=scaling)
        ctx.save_for_backward(x_ND, narrow, weight, down, up)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x_ND, narrow, weight, down, up = ctx.saved_tensors
        grad_narrow = (grad @ up).mul_(ctx.scaling)
        grad_x = (grad @ weight).addmm_(grad_narrow, down) if ctx.needs_input_grad[2] else None
        grad_down = grad_narrow.t() @ x_ND if ctx.needs_input_grad[4] else None
        grad_up = (grad.t() @ narrow).mul_(ctx.scaling) if ctx.needs_input_grad[5] else None
        return None, None, grad_x, None, grad_down, grad_up
