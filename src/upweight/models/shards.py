"""Sharded weights, of FSDP2 and of ZeRO-3, gathered one at a time."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def is_sharded(parameter: Any) -> bool:
    """Return whether a rank holds only a shard of this weight."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def any_sharded(model: nn.Module) -> bool:
    """Return whether any weight of a model is sharded over the ranks."""
    return any(map(is_sharded, model.parameters()))


def gathered_from_zero3(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    """Gather the weights that ZeRO-3 partitions on every rank inside; other weights stay as they are."""
    zero: Any = getattr(import_module("deepspeed"), "zero")  # noqa: B009 - it has no types
    return zero.GatheredParameters([parameter for parameter in parameters if hasattr(parameter, "ds_id")])


def local_shard(parameter: Any) -> Tensor:
    """Return this rank's shard of a weight, to be read and written."""
    return parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.detach()


def zero3_shard(value: Tensor, parameter: Any) -> Tensor:
    """Return this rank's shard of a whole tensor with the shape of a ZeRO-3 parameter; a shard is returned as it is."""
    local: Tensor = parameter.ds_tensor
    if value.shape == local.shape and value.shape != parameter.ds_shape:
        return value.to(local.device)
    shard = torch.zeros_like(local, dtype=value.dtype)
    part = value.flatten()[local.numel() * dist.get_rank() :][: local.numel()]
    shard[: len(part)].copy_(part)
    return shard


def drop_gathered(model: nn.Module) -> None:
    """Let FSDP2 and ZeRO-3 drop their gathered weights, so that the next forward gathers the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id") and parameter.numel() and getattr(parameter, "ds_shape", None):
            getattr(parameter, "partition")()  # noqa: B009 - a method that ZeRO-3 gives its parameters


@torch.no_grad()
def gathered_weights(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Gather every weight of a model, or of its adapter only, in host memory on rank 0; an empty dict elsewhere."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights: dict[str, Any] = {name: parameters.get(name, value) for name, value in model.state_dict().items()}
    if isinstance(model, PeftModel):
        weights = {name: value for name, value in weights.items() if getattr(value, "requires_grad", False)}
    gathered: dict[str, Tensor] = {}  # one by one: a device never holds more than the largest of them
    for name, value in weights.items():
        cast = dtype if value.dtype == torch.float32 else None
        if hasattr(value, "ds_id"):
            with gathered_from_zero3([value]):
                whole = value.detach().to("cpu", cast, copy=True)
        else:
            local = value.detach().to(cast or value.dtype)
            whole = (local.full_tensor() if isinstance(local, DTensor) else local).cpu()
        if dist.get_rank() == 0:
            gathered[name] = whole
    return gathered
