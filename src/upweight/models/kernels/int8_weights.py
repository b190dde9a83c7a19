"""Weights of linear layers in 8 bits, for the few rows of sampling: half the bytes are read beside those in training.

The weights of an output are divided by their largest magnitude / 127 and rounded. Activations stay as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upweight.models.kernels.lora_linear import few_rows, is_half_inference
from upweight.models.kernels.tiles import FEW_INT8_ROWS

_LARGEST = 127


class Int8Weight(NamedTuple):
    """Integers, and by output what they are multiplied by.

    The integers of the first half of the inputs are the low bytes, those of the second half the high ones.
    """

    pairs_FP: Tensor
    scale_F: Tensor


class Int8Weights:
    """Copies in 8 bits of the weights of layers, by layer; they stay at their addresses until they are released."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """`layers`: linear ones, or LoRA layers around these."""
        self._layers = list(layers)
        self._copies: dict[nn.Module, Int8Weight] = {}
        self._copied_from: dict[nn.Module, tuple[int, int]] = {}  # address and changes of a weight

    def forget(self) -> None:
        """Have all weights copied again: fused optimizers change them without counting the change."""
        self._copied_from.clear()

    def refresh(self) -> None:
        """Copy the weights that have changed since they were copied."""
        for layer in map(_linear, self._layers):
            weight: Tensor = layer.weight
            state = weight.data_ptr(), weight._version
            if self._copied_from.get(layer) == state:
                continue
            new = quantised(weight)
            for kept, part in zip(self._copies.setdefault(layer, new), new, strict=True):
                kept.copy_(part)
            self._copied_from[layer] = state

    def of(self, x_ND: Tensor, layers: Sequence[nn.Module]) -> list[Int8Weight]:
        """Return the copies that layers read for rows of x; none where there are no copies, or so many rows."""
        copies = [self._copies.get(_linear(layer)) for layer in layers] if _reads_8_bits(x_ND) else []
        return [copy for copy in copies if copy is not None]

    def forwards(self) -> dict[nn.Module, Callable[..., Tensor]]:
        """Return forwards of the layers that read the copies, for where no kernel does."""
        forwards: dict[nn.Module, Callable[..., Tensor]] = {}
        for outer in self._layers:
            layer = _linear(outer)
            forwards[layer] = partial(self._linear_forward, layer.forward)
            if outer is not layer:
                forwards[outer] = partial(_adapter_forward, outer.forward)
        return forwards

    def _linear_forward(self, stock: Callable[[Tensor], Tensor], layer: Any, x: Tensor) -> Tensor:
        if not _reads_8_bits(x):
            return stock(x)
        pairs_FP, scale_F = self._copies[layer]
        biases = [] if layer.bias is None else [layer.bias]
        if few_rows is not None and is_half_inference(x):
            x_ND = x.reshape(-1, x.shape[-1])
            out_NF = few_rows.linears(x_ND, [pairs_FP], biases, [], [], [], scales=[scale_F]).out_NF
            return out_NF.view(*x.shape[:-1], -1)
        return sum(biases, F.linear(x, integers(pairs_FP).to(x.dtype)) * scale_F.to(x.dtype))

    def bytes(self) -> int:
        """Return the memory of the copies."""
        return sum(part.nbytes for copy in self._copies.values() for part in copy)

    def release(self) -> None:
        """Free the copies."""
        self._copies.clear()
        self.forget()


def _adapter_forward(stock: Callable[..., Tensor], layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run PEFT's forward, which calls the base layer; ours reads the base layer's weight itself."""
    return type(layer).forward(layer, x, *args, **kwargs) if _reads_8_bits(x) else stock(x, *args, **kwargs)


def _reads_8_bits(x: Tensor) -> bool:
    return x.numel() <= FEW_INT8_ROWS * x.shape[-1]


def _linear(layer: Any) -> Any:
    return getattr(layer, "base_layer", layer)


def integers(pairs_FP: Tensor) -> Tensor:
    """Return the integers of pairs in the order of the inputs."""
    return pairs_FP.view(torch.int8).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)


def quantised(weight_FD: Tensor) -> Int8Weight:
    """Return a weight of an even number of inputs in 8 bits."""
    weight_FD = weight_FD.detach()
    smallest = torch.finfo(torch.float32).tiny  # for outputs whose weights are all 0
    scale_F = (weight_FD.abs().amax(1).float() / _LARGEST).clamp_(min=smallest)
    values_FD = (weight_FD.float() / scale_F[:, None]).round_().to(torch.int8)
    pairs_FP2 = torch.stack(values_FD.chunk(2, 1), -1)
    return Int8Weight(pairs_FP2.view(torch.int16).squeeze(-1), scale_F)
