"""The reference model: the policy at the start of the stage, computed with the policy's own module where possible.

Only trained weights differ from the start, so a frozen copy of those, swapped in for the length of a forward, is the
reference of any adapter and of a fully trained model; frozen weights exist once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from upweight.models.modules import dropout_off, every_module
from upweight.models.precision import TrainedWeight, trained_weights
from upweight.models.shards import drop_gathered, is_sharded, local_shard, zero3_shard

AdapterState = Literal["none", "identity", "changed"]
ReferenceKind = Literal["none", "adapter_off", "frozen_weights", "separate"]


class Reference(ABC):
    """A reference model that may share the policy's module."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._averages: dict[str, Tensor] = {}  # float32: small alphas vanish in the rounding of half precision

    @abstractmethod
    def use(self, wrapped: nn.Module) -> AbstractContextManager[nn.Module]:
        """Yield a module that computes the reference inside the context, without gradients or dropout."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what `sync` has changed, for a checkpoint; every rank must call it."""
        averages = self._averages.items()
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in averages}


def adapter_state(model: nn.Module) -> AdapterState:
    """Return whether a model has an adapter, and whether the adapter changes the base model's outputs."""
    if not isinstance(model, PeftModel):
        return "none"
    adapters = set(model.active_adapters)
    trained = (name.split(".") for name, weight in model.named_parameters() if weight.requires_grad)
    trains_base = any(adapters.isdisjoint(parts) for parts in trained)  # as by `LoraConfig(bias=...)`
    return "changed" if trains_base or not all(map(_is_identity, model.modules())) else "identity"


def _is_identity(module: nn.Module) -> bool:
    if isinstance(module, LoraLayer):
        linear = (p for name, up in module.lora_B.items() if name in module.active_adapters for p in up.parameters())
        embedding = (p for name, p in module.lora_embedding_B.items() if name in module.active_adapters)
        return not any(bool(parameter.any()) for parameter in (*linear, *embedding))
    if isinstance(module, ModulesToSaveWrapper):
        original = module.original_module.state_dict()
        return all(
            torch.equal(value, original[key].to(value.dtype))
            for name in module.active_adapters
            if name in module.modules_to_save
            for key, value in module.modules_to_save[name].state_dict().items()
        )
    return not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def reference_kind(
    *, needed: bool, adapter: AdapterState, separate: bool = False, synced: bool = False
) -> ReferenceKind:
    """Return the kind of reference of a run; `separate`: a second model, `synced`: it follows the policy."""
    if not needed:
        return "none"
    if separate:
        return "separate"
    return "adapter_off" if adapter == "identity" and not synced else "frozen_weights"


def make_reference(
    kind: ReferenceKind,
    policy: nn.Module,
    dtype: torch.dtype,
    *,
    synced: bool = False,
    offload: bool = False,
    separate_model: nn.Module | None = None,
) -> Reference | None:
    """Build the reference of this kind for the unwrapped `policy`, before its first step; None for kind "none"."""
    if kind == "none":
        return None
    if kind == "adapter_off":
        assert isinstance(policy, PeftModel)
        return AdapterOff(policy)
    if kind == "separate":
        assert separate_model is not None
        return SeparateModel(policy, separate_model)
    return FrozenWeights(policy, dtype, synced=synced, offload=offload)


class AdapterOff(Reference):
    """The base model under an adapter that began as zero."""

    @contextmanager
    def use(self, wrapped: nn.Module) -> Iterator[nn.Module]:
        # Not by PEFT's `disable_adapter_layers`, which also switches the gradients of every weight off and on again:
        # without gradients that is for nothing, and takes the host as long as launching a forward.
        parts = [
            one for one in every_module(self._policy) if isinstance(one, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        before = [part._disable_adapters for part in parts]
        try:
            for part in parts:
                vars(part)["_disable_adapters"] = True
            with torch.no_grad(), dropout_off(wrapped):
                yield wrapped
        finally:
            for part, disabled in zip(parts, before, strict=True):
                vars(part)["_disable_adapters"] = disabled


class LivePolicy(Reference):
    """The policy as it is now."""

    @contextmanager
    def use(self, wrapped: nn.Module) -> Iterator[nn.Module]:
        with torch.no_grad(), dropout_off(wrapped):
            yield wrapped


class FrozenWeights(Reference):
    """A copy of the trained weights at the start, in the compute dtype, swapped in for the current ones."""

    def __init__(self, policy: nn.Module, dtype: torch.dtype, *, synced: bool, offload: bool) -> None:
        super().__init__(policy)
        self._offload = offload  # the copy is in host memory, and on the device only inside `use`
        drop_gathered(policy)
        names = {parameter: name for name, parameter in policy.named_parameters()}
        self._weights: dict[str, TrainedWeight] = {}
        self._values: dict[str, Tensor] = {}
        for weight in trained_weights(policy, dtype):
            name, parameter = names[weight.parameter], weight.parameter
            self._weights[name] = weight
            home = torch.device("cpu") if offload else parameter.device
            self._values[name] = local_shard(parameter).to(home, weight.dtype, copy=True)
            if synced:
                self._averages[name] = parameter.detach().to(home, torch.float32, copy=True)
            if offload and parameter.is_cuda:  # a copy from pinned memory takes a fraction of the time
                self._values[name] = self._values[name].pin_memory()

    @contextmanager
    def use(self, wrapped: nn.Module) -> Iterator[nn.Module]:
        self._place_all()
        in_place = any(is_sharded(weight.parameter) for weight in self._weights.values())
        with self._exchanged_shards() if in_place else self._shadowed(), torch.no_grad(), dropout_off(wrapped):
            yield wrapped

    def sync(self, alpha: float) -> None:
        """Move the reference to `alpha * policy + (1 - alpha) * reference`."""
        self._place_all()
        with torch.no_grad():
            for name, average in self._averages.items():
                average.lerp_(self._weights[name].parameter.detach().to(average.device, torch.float32), alpha)
                self._values[name].copy_(average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        assert state.keys() == self._averages.keys(), "the saved reference belongs to another model"
        for name, average in state.items():
            self._averages[name] = average.float().clone()
            self._values[name] = average.to(self._values[name].dtype, copy=True)

    def _place_all(self) -> None:
        """Move frozen tensors to where the trained weights are now: another device, or shards."""
        drop_gathered(self._policy)
        for tensors in (self._values, self._averages):
            for name, tensor in tensors.items():
                parameter = self._weights[name].parameter
                if isinstance(parameter, DTensor) and not isinstance(tensor, DTensor):
                    whole = tensor.to(parameter.device)
                    tensors[name] = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                elif hasattr(parameter, "ds_id"):
                    tensors[name] = zero3_shard(tensor, parameter)
                elif tensor.device != parameter.device and not self._offload:
                    tensors[name] = tensor.to(parameter.device)

    @contextmanager
    def _shadowed(self) -> Iterator[None]:
        slots = [(vars(m), at, name) for name, weight in self._weights.items() for m, at in weight.slots]
        kept = [attributes.get(at) for attributes, at, _ in slots]
        here = {name: value.to(self._weights[name].parameter.device) for name, value in self._values.items()}
        for attributes, at, name in slots:
            attributes[at] = here[name]
        try:
            yield
        finally:
            for (attributes, at, _), before in zip(slots, kept, strict=True):
                if before is None:
                    del attributes[at]
                else:
                    attributes[at] = before

    @contextmanager
    def _exchanged_shards(self) -> Iterator[None]:
        """Swap the values of the shards, which ranks gather from, and drop what was gathered earlier."""
        shards = [local_shard(weight.parameter) for weight in self._weights.values()]
        kept = [shard.clone() for shard in shards]

        def write(values: Iterable[Tensor]) -> None:
            with torch.no_grad():
                for shard, value in zip(shards, values, strict=True):
                    shard.copy_(value)
            drop_gathered(self._policy)

        write(self._values.values())
        try:
            yield
        finally:
            write(kept)


class SeparateModel(Reference):
    """A second, frozen model."""

    def __init__(self, policy: nn.Module, model: nn.Module, device: torch.device | None = None) -> None:
        super().__init__(policy)
        self.model = model.requires_grad_(False).eval()
        self.device = device  # that the weights are on inside `use` only; None: they stay where they are

    @contextmanager
    def use(self, wrapped: nn.Module) -> Iterator[nn.Module]:
        if self.device is not None:
            nn.Module.to(self.model, self.device)
        try:
            with torch.no_grad():
                yield self.model
        finally:
            if self.device is not None:
                nn.Module.to(self.model, "cpu")

    def sync(self, alpha: float) -> None:
        policy = dict(self._policy.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                average = self._averages.setdefault(name, parameter.float().clone())
                parameter.copy_(average.lerp_(policy[name].to(average), alpha))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in state:
                    self._averages[name] = state[name].to(parameter.device, torch.float32, copy=True)
                    parameter.copy_(self._averages[name])


SyncedReference = FrozenWeights | SeparateModel  # a base model under an adapter does not follow the policy
