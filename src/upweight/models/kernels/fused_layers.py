"""RMS norms and SwiGLU blocks as one kernel each way: on a GPU their many small passes cost as much as attention.

A class is replaced only where its output on random inputs equals that of the fused form, for any architecture.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upweight.models.kernels.fused_projections import fuse_projections, gated_product

_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


def fuse_layers(model: nn.Module) -> None:
    """Run the RMS norms, SwiGLU blocks and query, key and value projections of a model on a GPU as fused kernels."""
    fuse_projections(model)
    forms: dict[type, Callable[..., Tensor] | None] = {}
    for module in model.modules():
        weight = next(module.parameters(), None)
        if weight is None or not weight.is_cuda or "forward" in vars(module):
            continue
        if type(module) not in forms:
            forms[type(module)] = next((form for form in (_norm, _gated) if proven(module, form)), None)
        if (form := forms[type(module)]) is not None:
            module.forward = MethodType(form, module)


def proven(module: Any, form: Callable[..., Tensor]) -> bool:
    """Return whether a module has the parts that a fused form needs, and the same output on random inputs."""
    if form is _norm:
        shapes = [(name, weight.dim()) for name, weight in module.named_parameters()]
        width = module.weight.numel() if _epsilon(module) is not None and shapes == [("weight", 1)] else 0
    else:
        named = dict(module.named_children())
        gated = _PROJECTIONS <= set(named) <= _PROJECTIONS | {"act_fn"} and callable(getattr(module, "act_fn", None))
        width = getattr(named["gate_proj"], "in_features", 0) if gated else 0
    if not width:
        return False
    weight = module.weight if form is _norm else module.gate_proj.weight  # as forwards read it, not a float32 master
    if not weight.is_floating_point():  # quantised
        return False
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(8, width, generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        stock, fused = module(x_ND).float(), form(module, x_ND).float()
    return bool((stock - fused).abs().max() <= 0.02 * stock.abs().max())


def _epsilon(module: nn.Module) -> float | None:
    """Return a norm's epsilon, under any of its usual names."""
    return next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), None)


def _norm(self: Any, x: Tensor) -> Tensor:
    """Compute x / sqrt(mean(x^2) + epsilon) * weight, in float32 inside."""
    if self.weight.dtype != x.dtype:
        return type(self).forward(self, x)
    return F.rms_norm(x, (x.shape[-1],), self.weight, _epsilon(self))


def _gated(self: Any, x: Tensor) -> Tensor:
    """Compute down(silu(gate(x)) * up(x))."""
    if (product := gated_product(x, self.gate_proj, self.up_proj)) is not None:
        return self.down_proj(product)
    gate, up = self.gate_proj(x), self.up_proj(x)
    if torch.compiler.is_compiling() or not x.is_cuda:
        return self.down_proj(_product(gate, up))
    # The same kernel with and without gradients: a policy that equals its reference has the same log-probs.
    return self.down_proj(_SiluTimes.apply(gate, up) if torch.is_grad_enabled() else _compiled(_product)(gate, up))


class _SiluTimes(torch.autograd.Function):
    """silu(gate) * up, which keeps only the two factors for backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _compiled(_product)(gate, up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor]:
        return _compiled(_slopes)(grad_outputs[0], *ctx.saved_tensors)


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _slopes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(gate.float())
    on_up = grad * (gate.float() * share)
    on_gate = grad * up * (share * (1 + gate.float() * (1 - share)))
    return on_gate.to(gate.dtype), on_up.to(up.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
