"""Layers that read the same input, such as query, key and value: one launch for all of them while decoding.

Only inside compiled layers, which is where decoding runs: whatever else runs a model computes as it always did.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from upweight.models.patches import few_rows, is_few, is_half_inference, plain_adapter

_SIBLINGS = ("q_proj", "k_proj", "v_proj")


class FusedProjections:
    """Layers in the order in which they are called, and what the first of them computed for the others."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.x: Tensor | None = None
        self.out: Tensor | None = None


def fuse_projections(model: nn.Module) -> None:
    """Let the query, key and value layers of a model that lies on a GPU be computed together."""
    for module in model.modules():
        layers: list[Any] = [getattr(module, name, None) for name in _SIBLINGS]
        if all(type(layer) in (nn.Linear, LoraLinear) and next(layer.parameters()).is_cuda for layer in layers):
            siblings = FusedProjections(layers)
            for place, layer in enumerate(layers):
                if "_siblings" not in vars(layer):
                    vars(layer).update(_siblings=siblings, _place=place, _alone=layer.forward)
                    layer.forward = MethodType(_forward, layer)


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The layer's output, cut from that of all siblings where the first was called with the same input."""
    if not torch.compiler.is_compiling() or args or kwargs:
        return self._alone(x, *args, **kwargs)
    siblings, place = self._siblings, self._place
    if place == 0:
        siblings.x, siblings.out = x, concatenated_outputs(x, siblings.layers)
    out = siblings.out if siblings.x is x else None
    if place == len(siblings.layers) - 1:
        siblings.x = siblings.out = None
    if out is None:
        return self._alone(x)
    widths = [layer.out_features for layer in siblings.layers]
    return out.split(widths, -1)[place]


def concatenated_outputs(x: Tensor, layers: list[Any]) -> Tensor | None:
    """The outputs of layers for one input, one after the other in its last axis; None where they are not plain."""
    x_ND = x.reshape(-1, x.shape[-1])
    parts = _parts(x_ND, layers)
    if few_rows is None or parts is None:
        return None
    weights, biases, downs, ups, scalings = parts
    # Apart, each layer with an adapter would cost two more launches, so there the limit holds for each layer.
    width = sum(map(len, weights)) // (len(weights) if downs else 1)
    if len(biases) not in (0, len(layers)) or not is_few(x_ND, width):
        return None
    return few_rows.few_rows_linears(x_ND, weights, biases, downs, ups, scalings).view(*x.shape[:-1], -1)


def gated_product(x: Tensor, gate: Any, up: Any) -> Tensor | None:
    """silu(gate(x)) * up(x) in one launch, or for many rows with the terms of their adapters in it; None for others."""
    x_ND = x.reshape(-1, x.shape[-1])
    parts = _parts(x_ND, [gate, up]) if torch.compiler.is_compiling() else None
    if few_rows is None or parts is None:
        return None
    weights, biases, downs, ups, scalings = parts
    few = x_ND.shape[0] <= few_rows.FEW_ROWS
    fills_gpu, adapted = len(weights[0]) >= few_rows.LEAST_GATED, bool(downs)
    if biases or not (fills_gpu if few else adapted):
        return None
    if few:
        out_NF = few_rows.few_rows_gated(x_ND, weights, downs, ups, scalings)
    else:
        narrow_NR = few_rows.few_rows_linears(x_ND, downs, [], [], [], [])
        gate_NF, up_NF = (F.linear(x_ND, weight) for weight in weights)
        out_NF = few_rows.gated_terms(gate_NF, up_NF, narrow_NR, ups, scalings)
    return out_NF.view(*x.shape[:-1], -1)


def _parts(
    x_ND: Tensor, layers: list[Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[float]] | None:
    """Weights, biases, and adapters of layers; None in training, where a layer is not plain, or they are not alike."""
    if few_rows is None or not is_half_inference(x_ND):
        return None
    found: list[Any] = []
    for layer in layers:
        if type(layer) is LoraLinear:
            found.append(plain_adapter(layer, x_ND))
        elif type(layer) is nn.Linear and layer.weight.dtype == x_ND.dtype:
            found.append((layer.weight, layer.bias, None, None, 0.0))
        else:
            return None
    if None in found:
        return None
    downs = [down for _, _, down, _, _ in found if down is not None]
    ranks = {len(down) for down in downs}
    if len(downs) not in (0, len(layers)) or len(ranks) > 1 or max(ranks, default=0) > few_rows.MOST_RANK:
        return None
    weights, biases, _, ups, scalings = map(list, zip(*found, strict=True))
    adapted = bool(downs)
    return weights, [b for b in biases if b is not None], downs, ups if adapted else [], scalings if adapted else []
