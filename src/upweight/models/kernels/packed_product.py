"""Products with weights in 4 bits: they are unpacked for the product, and again in backward."""

import importlib
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels.unpack import unpack
else:
    unpack = None

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows sorted by expert, weights, ends of the groups


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight is held as the packed bytes of bitsandbytes."""
    return getattr(weight, "quant_state", None) is not None


def has_packed_experts(experts: nn.Module) -> bool:
    """Return whether a module has packed weights itself."""
    return any(is_packed(weight) for weight in experts.parameters(recurse=False))


def unpacked(weight: Any) -> Tensor:
    """Return the weight that packed bytes stand for, in the dtype that it was read in."""
    state = weight.quant_state
    is_whole = weight.is_contiguous() and math.prod(state.shape) % state.blocksize == 0
    if unpack is not None and weight.is_cuda and is_whole:
        return unpack(weight.data, state)
    return importlib.import_module("bitsandbytes.functional").dequantize_4bit(weight.data, state)


def dense(weight: Tensor) -> Tensor:
    """Return a weight as products read it: one that is packed is unpacked."""
    return unpacked(weight) if is_packed(weight) else weight


def dtype_of(weight: Any) -> torch.dtype:
    """Return the dtype in which products read a weight."""
    return weight.quant_state.dtype if is_packed(weight) else weight.dtype


def packed_product(
    product: GroupedProduct, x_SD: Tensor, weight: Tensor, ends_X: Tensor, *, is_transposed: bool
) -> Tensor:
    """Return the grouped product of rows with packed weights, of which only the bytes are kept for backward."""

    def unpack() -> Tensor:
        return unpacked(weight) if is_transposed else unpacked(weight).transpose(-2, -1)

    return _uncompiled(product, unpack, x_SD, ends_X)


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: GroupedProduct, unpack: Callable[[], Tensor], x_SD: Tensor, ends_X: Tensor
    ) -> Tensor:
        ctx.product, ctx.unpack, ctx.dtype = product, unpack, x_SD.dtype
        ctx.save_for_backward(ends_X)
        return product(x_SD, unpack(), ends_X)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_SD,), (ends_X,) = grads, ctx.saved_tensors
        back_SD = ctx.product(grad_SD.contiguous(), ctx.unpack().transpose(-2, -1), ends_X)
        return None, None, back_SD.to(ctx.dtype), None


# A compiler would take the shape of the weight for that of its bytes.
_uncompiled: Any = torch.compiler.disable(_PackedProduct.apply)
