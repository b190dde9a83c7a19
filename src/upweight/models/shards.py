"""Weights of which each rank holds a piece: FSDP2's shards and ZeRO-3's partitions, gathered one after the other."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def is_sharded(parameter: Any) -> bool:
    """Whether a rank holds only its piece of this weight."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


def lies_in_pieces(model: nn.Module) -> bool:
    """Whether any weight of a model is spread over the ranks."""
    return any(map(is_sharded, model.parameters()))


def zero_gathered(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Any]:
    """Inside, every rank holds these weights of ZeRO-3 whole; what is not partitioned is left alone."""
    zero: Any = getattr(import_module("deepspeed"), "zero")  # noqa: B009 - it has no types
    return zero.GatheredParameters([one for one in parameters if hasattr(one, "ds_id")])


def local_shard(parameter: Any) -> Tensor:
    """What this rank holds of a weight, to be read and written."""
    return parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter.detach()


def zero3_shard(value: Tensor, parameter: Any) -> Tensor:
    """The part of a whole tensor that ZeRO-3 keeps on this rank for a parameter of its shape; a part stays itself."""
    own: Tensor = parameter.ds_tensor
    if value.shape == own.shape and value.shape != parameter.ds_shape:
        return value.to(own.device)
    piece = torch.zeros_like(own, dtype=value.dtype)
    part = value.flatten()[own.numel() * dist.get_rank() :][: own.numel()]
    piece[: len(part)].copy_(part)
    return piece


def partition_zero3(model: nn.Module) -> None:
    """Have ZeRO-3 keep nothing but its pieces, so that they are what the next forward gathers."""
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id") and parameter.numel() and getattr(parameter, "ds_shape", None):
            getattr(parameter, "partition")()  # noqa: B009 - a method that ZeRO-3 gives its parameters


@torch.no_grad()
def gathered_weights(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Every weight of a model, or of its adapter alone, in host memory on rank 0; an empty dict on other ranks.

    A device never holds more than the largest of them. Trained float32 weights come in `dtype` where it is given.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name: parameters.get(name, value) for name, value in model.state_dict().items()}
    if isinstance(model, PeftModel):
        wanted = {name: value for name, value in wanted.items() if getattr(value, "requires_grad", False)}
    keeps = dist.get_rank() == 0
    return {name: value for name, value in _one_by_one(wanted, dtype) if keeps}


def _one_by_one(wanted: dict[str, Any], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, value in wanted.items():
        cast = dtype if value.dtype == torch.float32 else None
        if hasattr(value, "ds_id"):
            with zero_gathered([value]):
                yield name, value.detach().to("cpu", cast, copy=True)
        else:
            own = value.detach().to(cast or value.dtype)
            yield name, (own.full_tensor() if isinstance(own, DTensor) else own).cpu()
