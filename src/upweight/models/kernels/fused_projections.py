"""Query, key and value projections, which read the same input, as one kernel launch while decoding.

They are fused only inside compiled layers, which decoding uses; every other forward is unchanged.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from upweight.models.patches import few_rows, is_few, is_half_inference, plain_adapter

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class FusedProjections:
    """Layers in their order of calls, and the outputs that the first of them computed for all."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.x: Tensor | None = None
        self.out: Tensor | None = None


def fuse_projections(model: nn.Module) -> None:
    """Fuse the query, key and value layers of a model on a GPU."""
    for module in model.modules():
        layers: list[Any] = [getattr(module, name, None) for name in _PROJECTIONS]
        if all(type(layer) in (nn.Linear, LoraLinear) and next(layer.parameters()).is_cuda for layer in layers):
            fused = FusedProjections(layers)
            for place, layer in enumerate(layers):
                if "_fused" not in vars(layer):
                    vars(layer).update(_fused=fused, _place=place, _unfused_forward=layer.forward)
                    layer.forward = MethodType(_forward, layer)


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the layer's output, cut from the fused output where the first layer was called with the same input."""
    if not torch.compiler.is_compiling() or args or kwargs:
        return self._unfused_forward(x, *args, **kwargs)
    fused, place = self._fused, self._place
    if place == 0:
        fused.x, fused.out = x, concatenated_outputs(x, fused.layers)
    out = fused.out if fused.x is x else None
    if place == len(fused.layers) - 1:
        fused.x = fused.out = None
    if out is None:
        return self._unfused_forward(x)
    widths = [layer.out_features for layer in fused.layers]
    return out.split(widths, -1)[place]


def concatenated_outputs(x: Tensor, layers: list[Any]) -> Tensor | None:
    """Return the outputs of layers for one input, concatenated along the last axis; None if they cannot be fused."""
    x_ND = x.reshape(-1, x.shape[-1])
    parts = _parts(x_ND, layers)
    if few_rows is None or parts is None:
        return None
    weights, biases, downs, ups, scalings = parts
    # Unfused, each layer with an adapter would cost two more launches, so there the limit holds for each layer.
    width = sum(map(len, weights)) // (len(weights) if downs else 1)
    if len(biases) not in (0, len(layers)) or not is_few(x_ND, width):
        return None
    return few_rows.few_rows_linears(x_ND, weights, biases, downs, ups, scalings).view(*x.shape[:-1], -1)


def gated_product(x: Tensor, gate: Any, up: Any) -> Tensor | None:
    """Compute silu(gate(x)) * up(x) in one launch, for many rows only with adapters; None where fusing does not pay."""
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
    """Return weights, biases and adapters of layers; None in training, or where layers are not plain or differ."""
    if few_rows is None or not is_half_inference(x_ND):
        return None
    plain: list[Any] = []
    for layer in layers:
        if type(layer) is LoraLinear:
            plain.append(plain_adapter(layer, x_ND))
        elif type(layer) is nn.Linear and layer.weight.dtype == x_ND.dtype:
            plain.append((layer.weight, layer.bias, None, None, 0.0))
        else:
            return None
    if None in plain:
        return None
    downs = [down for _, _, down, _, _ in plain if down is not None]
    ranks = {len(down) for down in downs}
    if len(downs) not in (0, len(layers)) or len(ranks) > 1 or max(ranks, default=0) > few_rows.MOST_RANK:
        return None
    weights, biases, _, ups, scalings = map(list, zip(*plain, strict=True))
    adapted = bool(downs)
    return weights, [b for b in biases if b is not None], downs, ups if adapted else [], scalings if adapted else []
