"""Offload activations to host memory between forward and backward."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from upweight.engine.forward import base_of, body_of

SMALLEST = 1 << 18  # elements; copying smaller tensors does not pay


def offload_activations(model: nn.Module) -> None:
    """Save what layers keep for backward in host memory from now on; with checkpointing, only their inputs."""
    body = body_of(base_of(model))
    stock = body.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with OffloadActivations(model) if torch.is_grad_enabled() else contextlib.nullcontext():
            return stock(*args, **kwargs)

    body.forward = forward


class OffloadActivations(saved_tensors_hooks):
    """A context in which forwards save large tensors for backward in host memory; weights stay on the device."""

    def __init__(self, model: nn.Module, smallest: int = SMALLEST) -> None:
        self._model, self._smallest = model, smallest
        self._weights: set[int] = set()
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._weights = {tensor.untyped_storage().data_ptr() for tensor in _weights(self._model)}
        super().__enter__()

    def _pack(self, tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        if tensor.numel() < self._smallest or tensor.untyped_storage().data_ptr() in self._weights:
            return None, tensor
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, on_host.copy_(tensor, non_blocking=True)

    def _unpack(self, packed: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor if device is None else tensor.to(device, non_blocking=True)


def _weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, and the compute copies under their names."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            copy: Any = vars(module).get(name)
            yield parameter
            if isinstance(copy, Tensor):
                yield copy
