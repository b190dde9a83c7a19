"""The product of a frozen linear layer with its LoRA adapter, and the choice of kernel by the number of rows."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from upweight.models.kernels.packed_product import dense, dtype_of, is_packed
from upweight.models.kernels.recompute import empty
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


def is_known_linear(layer: Any) -> bool:
    """Return whether a layer is linear, with an adapter or without, and of a class whose forward is known."""
    if type(layer) in (nn.Linear, LoraLinear):
        return True
    base = layer.base_layer if isinstance(layer, LoraLayer) else layer
    return isinstance(base, nn.Linear) and is_packed(base.weight)


def plain_adapter(layer: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
    """Return weight, bias, adapter weights and scaling of a layer whose adapter only adds a low-rank product.

    The weight may be packed.
    """
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or layer.lora_variant or len(active) != 1 or layer.fan_in_fan_out:
        return None
    (name,) = active
    base, down, up, dropout = layer.base_layer, layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    plain = is_known_linear(base) and type(down) is type(up) is nn.Linear and up.bias is None
    idle = isinstance(dropout, nn.Identity) or not dropout.training
    if not (plain and idle) or torch.is_autocast_enabled(x.device.type):
        return None
    frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
    if not (frozen and all(is_readable(linear, x) for linear in (base, down, up))):
        return None
    return base.weight, base.bias, down.weight, up.weight, float(layer.scaling[name])


def is_readable(linear: Any, x: Tensor) -> bool:
    """Return whether products of x may read a layer's weight, which is plain or packed, as the layer does."""
    if is_packed(linear.weight):  # a compiler would take the shape of its bytes for that of the weight
        known = linear.compute_dtype in (None, x.dtype) and not torch.compiler.is_compiling()
    else:
        known = type(linear.weight) in (Tensor, nn.Parameter)
    return known and dtype_of(linear.weight) == x.dtype


class LowRankLinear(torch.autograd.Function):
    """x W' + b + s (x A') B' for frozen W and b: the low-rank terms are added by the products themselves.

    A packed W is unpacked for each product, and only its bytes are kept.
    """

    @staticmethod
    def forward(ctx: Any, scaling: float, bias: Tensor | None, unread: bool, *tensors: Tensor) -> Tensor:
        """`unread`: nothing reads the output, which is not computed."""
        x_ND, weight, down, up = tensors
        narrow = F.linear(x_ND, down)
        if unread:
            out = empty((len(x_ND), len(up)), x_ND)
        else:
            out = F.linear(x_ND, dense(weight), bias).addmm_(narrow, up.t(), alpha=scaling)
        packed = is_packed(weight)
        ctx.save_for_backward(x_ND, narrow, None if packed else weight, down, up)
        ctx.scaling, ctx.packed = scaling, weight if packed else None  # saved, it would lose what it is unpacked by
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x_ND, narrow, weight, down, up = ctx.saved_tensors
        weight = dense(ctx.packed) if weight is None and ctx.needs_input_grad[3] else weight
        grad_narrow = _scaled_product(grad, up, ctx.scaling)
        grad_x = (grad @ weight).addmm_(grad_narrow, down) if ctx.needs_input_grad[3] else None
        grad_down = grad_narrow.t() @ x_ND if ctx.needs_input_grad[5] else None
        grad_up = _scaled_product(grad.t(), narrow, ctx.scaling) if ctx.needs_input_grad[6] else None
        return None, None, None, grad_x, None, grad_down, grad_up


def _scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Return scaling * left @ right, where the product itself scales: no launch more, and no rounding before it."""
    return torch.addmm(_nothing(left.dtype, left.device), left, right, beta=0, alpha=scaling)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what a product is added to where it is added to nothing."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device=device)
