"""RMS norms and SwiGLU blocks as one kernel each way: on a GPU their many small passes cost as much as attention.

A class is replaced only where its output on random inputs equals that of the fused form, for any architecture. Query,
key and value projections, which read the same input, are one kernel launch inside compiled layers, which decoding uses.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from upweight.models.kernels.lora_linear import (
    few_rows,
    gated,
    gated_output,
    has_gated_adapters,
    is_few,
    is_half_inference,
    is_known_linear,
    is_readable,
    plain_adapter,
)
from upweight.models.kernels.packed_product import dense, is_packed
from upweight.models.kernels.tiles import FEW_ROWS, MIN_GATED_OUTPUTS
from upweight.models.modules import GATED_PROJECTIONS, replaced_forwards

Tensors = list[Tensor]


def fuse_layers(model: nn.Module) -> None:
    """Run the RMS norms, SwiGLU blocks and query, key and value projections of a model on a GPU as fused kernels.

    Blocks with adapters are one node on any device.
    """
    fuse_projections(model)
    forms: dict[type, Callable[..., Tensor] | None] = {}
    for module in model.modules():
        weight = next(module.parameters(), None)
        if weight is None or not (weight.is_cuda or has_gated_adapters(module)) or "forward" in vars(module):
            continue
        if type(module) not in forms:
            forms[type(module)] = next((form for form in (_norm, _gated_mlp) if same_output(module, form)), None)
        if (form := forms[type(module)]) is not None:
            module.forward = MethodType(form, module)


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module is x / sqrt(mean(x^2) + epsilon) * weight."""
    return same_output(module, _norm)


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module is down(silu(gate(x)) * up(x))."""
    return same_output(module, _gated_mlp)


def same_output(module: Any, form: Callable[..., Tensor]) -> bool:
    """Return whether a module has the parts that a fused form needs, and computes the same from random numbers."""
    return _is_plain_norm(module) if form is _norm else _is_plain_block(module)


def _is_plain_norm(module: Any) -> bool:
    """Return whether a module is an RMS norm, by its output."""
    if epsilon_of(module) is None or [(name, one.dim()) for name, one in module.named_parameters()] != [("weight", 1)]:
        return False
    weight = module.weight  # as forwards read it, not a float32 master
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(8, weight.numel(), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        stock, fused = module(x_ND).float(), _norm(module, x_ND).float()
    return bool((stock - fused).abs().max() <= 0.02 * stock.abs().max())


def _is_plain_block(module: Any) -> bool:
    """Return whether a module is a SwiGLU block, by what it does with numbers in place of its projections' outputs.

    No weight is read: those of another rank may still be empty, and ranks must agree.
    """
    named, parts = dict(module.named_children()), set(GATED_PROJECTIONS)
    if not (parts <= set(named) <= parts | {"act_fn"} and callable(getattr(module, "act_fn", None))):
        return False
    gate, up, down = (named[name] for name in GATED_PROJECTIONS)
    weight = getattr(getattr(gate, "base_layer", gate), "weight", None)
    if weight is None or not (weight.is_floating_point() or is_packed(weight)):  # quantised in another way
        return False
    gate_NF, up_NF = torch.linspace(-4, 4, 64).view(8, 8), torch.linspace(2, -3, 64).view(8, 8)
    forwards = {gate: lambda *_: gate_NF, up: lambda *_: up_NF, down: lambda _, product: product}
    with torch.no_grad(), replaced_forwards(forwards):
        out = module(torch.ones(8, 8))
    return out.shape == gate_NF.shape and torch.allclose(out, _silu_product(gate_NF, up_NF), atol=1e-4)


def epsilon_of(module: nn.Module) -> float | None:
    """Return a norm's epsilon, under any of its usual names."""
    return next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), None)


def _norm(self: Any, x: Tensor) -> Tensor:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight, in float32 inside."""
    if self.weight.dtype != x.dtype:
        return type(self).forward(self, x)
    return F.rms_norm(x, (x.shape[-1],), self.weight, epsilon_of(self))


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) * up(x))."""
    if (out := gated_output(self, x)) is not None:
        return out
    if (product := gated_product(x, self.gate_proj, self.up_proj)) is not None:
        return self.down_proj(product)
    gate, up = self.gate_proj(x), self.up_proj(x)
    if torch.compiler.is_compiling() or not x.is_cuda:
        return self.down_proj(_silu_product(gate, up))
    # The same kernel with and without gradients: a policy that equals its reference has the same log-probs.
    return self.down_proj(_SiluTimes.apply(gate, up) if torch.is_grad_enabled() else _gate(gate, up))


class _SiluTimes(torch.autograd.Function):
    """silu(gate) * up, which keeps only the two factors for backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gate(gate, up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        return _compiled(_silu_gradients)(grad_outputs[0], *ctx.saved_tensors)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up in one kernel."""
    # Not by the compiler where it can be helped: it starts for seconds, before the first rollout.
    return gated.silu_product(gate, up) if gated is not None else _compiled(_silu_product)(gate, up)


def _silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _silu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(gate.float())
    on_up = grad * (gate.float() * share)
    on_gate = grad * up * (share * (1 + gate.float() * (1 - share)))
    return on_gate.to(gate.dtype), on_up.to(up.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


class FusedProjections:
    """Layers in their order of calls, and the outputs that the first of them computed for all."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.x: Tensor | None = None
        self.out: Tensor | None = None


def fuse_projections(model: nn.Module) -> None:
    """Fuse the query, key and value layers of a model on a GPU."""
    for module in model.modules():
        layers: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if all(type(layer) in (nn.Linear, LoraLinear) and next(layer.parameters()).is_cuda for layer in layers):
            fused = FusedProjections(layers)
            for index, layer in enumerate(layers):
                if "_fused" not in vars(layer):
                    vars(layer).update(_fused=fused, _index=index, _unfused_forward=layer.forward)
                    layer.forward = MethodType(_projection_forward, layer)


def _projection_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the layer's output, cut from the fused output where the first layer was called with the same input."""
    if not torch.compiler.is_compiling() or args or kwargs:
        return self._unfused_forward(x, *args, **kwargs)
    fused, index = self._fused, self._index
    if index == 0:
        fused.x, fused.out = x, concatenated_outputs(x, fused.layers)
    out = fused.out if fused.x is x else None
    if index == len(fused.layers) - 1:
        fused.x = fused.out = None
    if out is None:
        return self._unfused_forward(x)
    widths = [layer.out_features for layer in fused.layers]
    return out.split(widths, -1)[index]


def concatenated_outputs(x: Tensor, layers: list[Any]) -> Tensor | None:
    """Return the outputs of layers for one input, concatenated along the last axis; None if they cannot be fused."""
    x_ND = x.reshape(-1, x.shape[-1])
    parts = plain_weights(x_ND, layers)
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
    parts = plain_weights(x_ND, [gate, up]) if torch.compiler.is_compiling() else None
    if few_rows is None or gated is None or parts is None:
        return None
    weights, biases, downs, ups, scalings = parts
    few = x_ND.shape[0] <= FEW_ROWS
    fills_gpu, adapted = len(weights[0]) >= MIN_GATED_OUTPUTS, bool(downs)
    if biases or not (fills_gpu if few else adapted):
        return None
    if few:
        out_NF = gated.few_rows_gated(x_ND, weights, downs, ups, scalings)
    else:
        narrow_NR = few_rows.few_rows_linears(x_ND, downs, [], [], [], [])
        gate_NF, up_NF = (F.linear(x_ND, weight) for weight in weights)
        out_NF = gated.gated_terms(gate_NF, up_NF, narrow_NR, ups, scalings)
    return out_NF.view(*x.shape[:-1], -1)


def plain_weights(x_ND: Tensor, layers: list[Any]) -> tuple[Tensors, Tensors, Tensors, Tensors, list[float]] | None:
    """Return weights, biases and adapters of layers; None in training, or where layers are not plain or differ.

    Packed weights are unpacked.
    """
    if few_rows is None or not is_half_inference(x_ND):
        return None
    plain: list[Any] = []
    for layer in layers:
        if not is_known_linear(layer):
            return None
        if isinstance(layer, LoraLayer):
            plain.append(plain_adapter(layer, x_ND))
        elif is_readable(layer, x_ND):
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
    adapted, weights = bool(downs), list(map(dense, weights))
    return weights, [b for b in biases if b is not None], downs, ups if adapted else [], scalings if adapted else []
