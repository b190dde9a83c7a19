"""Rotary positions in one kernel each way on a GPU and three operators elsewhere: the stock function takes five.

What is not the plain case (other dtypes, layouts or arguments, compiled layers) still runs the stock function.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels import elementwise
else:
    elementwise = None

NAME = "apply_rotary_pos_emb"


def fused_form(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fuses the plain case of a stock one."""

    @functools.wraps(stock)
    def rotate(q: Tensor, k: Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or torch.compiler.is_compiling() or not _is_plain(q, k, cos, sin):
            return stock(q, k, cos, sin, *args, **kwargs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)

    return rotate


def _is_plain(q: Tensor, k: Tensor, cos: Any, sin: Any) -> bool:
    """Return whether heads [B, heads, N, width] are rotated as a whole by [B, N, width] in their own dtype."""
    tables = isinstance(cos, Tensor) and isinstance(sin, Tensor) and not (cos.requires_grad or sin.requires_grad)
    if not tables or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    same = all(x.dim() == 4 and x.dtype == cos.dtype == sin.dtype and x.shape[-1] == cos.shape[-1] for x in (q, k))
    return same and q.shape[-1] % 2 == 0


def same_rotation(stock: Callable[..., Any], fused: Callable[..., Any]) -> bool:
    """Return whether both functions agree on random numbers, in which no symmetry hides a difference."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 5, 8, generator=generator)
    try:
        both = zip(stock(q, k, cos, sin), fused(q, k, cos, sin), strict=True)
        return all(torch.allclose(one, other, atol=1e-5) for one, other in both)
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments: another kind of positions
        return False


class _Rotated(torch.autograd.Function):
    """x * cos + [-x2, x1] * sin for x = [x1, x2]; keeps nothing of x for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if (rotated := _by_kernel(x, cos, sin, back=False)) is not None:
            return rotated
        out = x * cos
        (left, right), (x1, x2), (sin1, sin2) = (one.chunk(2, -1) for one in (out, x, sin))
        left.addcmul_(x2, sin1, value=-1)
        right.addcmul_(x1, sin2)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (grad,), (cos, sin) = grad_outputs, ctx.saved_tensors
        if (rotated := _by_kernel(grad, cos, sin, back=True)) is not None:
            return rotated, None, None
        out = grad * cos
        (left, right), (grad1, grad2), (sin1, sin2) = (one.chunk(2, -1) for one in (out, grad, sin))
        left.addcmul_(grad2, sin2)
        right.addcmul_(grad1, sin1, value=-1)
        return out, None, None


def _by_kernel(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor | None:
    """Return heads rotated by our kernel; None where torch's operators have to."""
    rows = all(one.stride(-1) == 1 for one in (x, cos, sin))
    if elementwise is None or not x.is_cuda or x.dtype == torch.float64 or not rows:
        return None
    return elementwise.rotated(x, cos.squeeze(1), sin.squeeze(1), back=back)
