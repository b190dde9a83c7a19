"""RMS norms and SwiGLU blocks as one kernel each way: on a GPU their many small passes cost as much as attention.

A class is taken over only where it proves on random numbers to compute just that, so no architecture is named here.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upweight.models.kernels.fused_projections import gated_product, fuse_projections

_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}


def fuse_layers(model: nn.Module) -> None:
    """Let the plain norms and gated blocks of a model that lies on a GPU run fused, and its siblings together."""
    fuse_projections(model)
    verdicts: dict[type, Callable[..., Tensor] | None] = {}
    for module in model.modules():
        weight = next(module.parameters(), None)
        if weight is None or not weight.is_cuda or "forward" in vars(module):
            continue
        if type(module) not in verdicts:
            verdicts[type(module)] = next((form for form in (_norm, _gated) if proven(module, form)), None)
        if (form := verdicts[type(module)]) is not None:
            module.forward = MethodType(form, module)


def proven(module: Any, form: Callable[..., Tensor]) -> bool:
    """Whether a module has the parts that a form needs, and gives what the form gives."""
    if form is _norm:
        width = module.weight.numel() if _epsilon(module) is not None and _only_weight(module) else 0
    else:
        named = dict(module.named_children())
        gated = _PROJECTIONS <= set(named) <= _PROJECTIONS | {"act_fn"} and callable(getattr(module, "act_fn", None))
        width = getattr(named["gate_proj"], "in_features", 0) if gated else 0
    if not width:
        return False
    weight = module.weight if form is _norm else module.gate_proj.weight  # as forwards read it, not a float32 master
    if not weight.is_floating_point():  # quantised
        return False
    own = torch.Generator().manual_seed(0)
    x_ND = torch.randn(8, width, generator=own).to(weight.device, weight.dtype)
    with torch.no_grad():
        right, found = module(x_ND).float(), form(module, x_ND).float()
    return bool((right - found).abs().max() <= 0.02 * right.abs().max())


def _only_weight(module: nn.Module) -> bool:
    return [(name, weight.dim()) for name, weight in module.named_parameters()] == [("weight", 1)]


def _epsilon(module: nn.Module) -> float | None:
    """A norm's epsilon, by the names that norms give it."""
    return next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), None)


def _norm(self: Any, x: Tensor) -> Tensor:
    """x / root of its mean square * weight, in float32 inside."""
    if self.weight.dtype != x.dtype:
        return type(self).forward(self, x)
    return F.rms_norm(x, (x.shape[-1],), self.weight, _epsilon(self))


def _gated(self: Any, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))."""
    if (product := gated_product(x, self.gate_proj, self.up_proj)) is not None:
        return self.down_proj(product)
    gate, up = self.gate_proj(x), self.up_proj(x)
    if torch.compiler.is_compiling() or not x.is_cuda:
        return self.down_proj(_product(gate, up))
    # The same kernel with and without gradients: a policy that is its reference differs by nothing.
    return self.down_proj(_SiluTimes.apply(gate, up) if torch.is_grad_enabled() else _compiled(_product)(gate, up))


class _SiluTimes(torch.autograd.Function):
    """silu(gate) * up, of which only the two factors are kept."""

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
