"""The product of a frozen linear layer with its LoRA adapter, and the choice of kernel by the number of rows."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from upweight.models.kernels.tiles import most_rows

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels import gated
    from upweight.models.kernels import linear as few_rows
else:
    few_rows = gated = None  # without Triton, products of few rows run through torch


def is_few(x_ND: Tensor, width: int) -> bool:
    """Return whether rows are so few that our kernel computes a product of this width faster than torch."""
    if few_rows is None or not is_half_inference(x_ND):
        return False
    return x_ND.shape[0] <= most_rows(x_ND.shape[1], width)


def is_half_inference(x_ND: Tensor) -> bool:
    """Return whether rows are on a GPU in half precision without gradients, as in sampling."""
    return x_ND.is_cuda and x_ND.dtype != torch.float32 and not torch.is_grad_enabled()


def plain_adapter(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Return weight, bias, adapter weights and scaling of a layer whose adapter only adds a low-rank product."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or layer.lora_variant or len(active) != 1 or layer.fan_in_fan_out:
        return None
    (name,) = active
    base, down, up, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = all(type(linear) is nn.Linear for linear in (base, down, up)) and up.bias is None
    idle = isinstance(dropout, nn.Identity) or not dropout.training
    if not (plain and idle) or torch.is_autocast_enabled(x.device.type):
        return None
    weights: list[Tensor] = [base.weight, down.weight, up.weight]
    frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    one_dtype = all(type(w) in (Tensor, nn.Parameter) and w.dtype == x.dtype for w in weights)
    if not (frozen and one_dtype):
        return None
    return base.weight, base.bias, down.weight, up.weight, float(layer.scaling[name])


class LowRankLinear(torch.autograd.Function):
    """x W' + b + s (x A') B' for frozen W and b: the low-rank terms are added by the products themselves."""

    @staticmethod
    def forward(ctx: Any, scaling: float, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        x_ND, weight, down, up = tensors
        narrow = F.linear(x_ND, down)
        out = F.linear(x_ND, weight, bias).addmm_(narrow, up.t(), alpha=scaling)
        ctx.save_for_backward(x_ND, narrow, weight, down, up)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x_ND, narrow, weight, down, up = ctx.saved_tensors
        grad_narrow = _scaled_product(grad, up, ctx.scaling)
        grad_x = (grad @ weight).addmm_(grad_narrow, down) if ctx.needs_input_grad[2] else None
        grad_down = grad_narrow.t() @ x_ND if ctx.needs_input_grad[4] else None
        grad_up = _scaled_product(grad.t(), narrow, ctx.scaling) if ctx.needs_input_grad[5] else None
        return None, None, grad_x, None, grad_down, grad_up


def _scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Return scaling * left @ right, where the product itself scales: no launch more, and no rounding before it."""
    return torch.addmm(_nothing(left.dtype, left.device), left, right, beta=0, alpha=scaling)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what a product is added to where it is added to nothing."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)
