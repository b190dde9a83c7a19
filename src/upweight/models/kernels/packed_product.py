"""The product with experts in 4 bits: all of a layer are unpacked for it, and again in backward."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows sorted by expert, weights, ends of the groups


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight is held as the packed bytes of bitsandbytes."""
    return getattr(weight, "quant_state", None) is not None


def has_packed_experts(experts: nn.Module) -> bool:
    """Return whether a module has packed weights itself."""
    return any(is_packed(weight) for weight in experts.parameters(recurse=False))


def unpacked(weight: Any) -> Tensor:
    """Return the weight that packed bytes stand for, in the dtype that it was read in."""
    return importlib.import_module("bitsandbytes.functional").dequantize_4bit(weight.data, weight.quant_state)


@torch.compiler.disable
def packed_product(
    product: GroupedProduct, x_SD: Tensor, weight: Tensor, ends_X: Tensor, is_transposed: bool
) -> Tensor:
    """Return the grouped product of rows with packed weights, of which only the bytes are kept for backward."""
    out = _PackedProduct.apply(product, x_SD, weight, ends_X, is_transposed)
    assert isinstance(out, Tensor)
    return out


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: GroupedProduct, x_SD: Tensor, weight: Tensor, ends_X: Tensor, is_transposed: bool
    ) -> Tensor:
        ctx.product, ctx.weight, ctx.is_transposed, ctx.dtype = product, weight, is_transposed, x_SD.dtype
        ctx.save_for_backward(ends_X)
        whole = unpacked(weight)
        return product(x_SD, whole if is_transposed else whole.transpose(-2, -1), ends_X)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad_SD,), (ends_X,) = grads, ctx.saved_tensors
        whole = unpacked(ctx.weight)
        back = ctx.product(grad_SD.contiguous(), whole.transpose(-2, -1) if ctx.is_transposed else whole, ends_X)
        return None, back.to(ctx.dtype), None, None, None
