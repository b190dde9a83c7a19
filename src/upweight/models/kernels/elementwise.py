# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Rotations of heads and casts of gradients in one Triton kernel each, which is bound by the bytes that it moves."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch

_CAST = 1024  # numbers that a program casts; torch's own cast moves half as many bytes a second


def widened(values: Tensor) -> Tensor:
    """Return a contiguous tensor in float32."""
    out = torch.empty_like(values, dtype=torch.float32)
    if count := values.numel():
        launch(_cast_kernel, (triton.cdiv(count, _CAST),), values, out, count, COUNT=_CAST, num_warps=4)
    return out


def rotated(x_BHNW: Tensor, cos_BNW: Tensor, sin_BNW: Tensor, *, back: bool) -> Tensor:
    """Return x * cos + [-x2, x1] * sin for x = [x1, x2]; `back`: the gradient of x from that of the result."""
    out_BHNW = torch.empty_like(x_BHNW)
    batch, heads, tokens, width = x_BHNW.shape
    tables = cos_BNW.expand(batch, tokens, width), sin_BNW.expand(batch, tokens, width)
    if x_BHNW.numel():
        launch(
            _rotate_kernel, (tokens, batch), x_BHNW, *tables, out_BHNW, *x_BHNW.stride()[:3], *out_BHNW.stride()[:3],
            *tables[0].stride()[:2], *tables[1].stride()[:2],
            BACK=back, HEADS=heads, HALF=width // 2, HEADS_AT_ONCE=min(16, triton.next_power_of_2(heads)),
            COLUMNS=triton.next_power_of_2(width // 2), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_BHNW


@triton.jit(do_not_specialize=["count"])
def _cast_kernel(from_at, to_at, count, COUNT: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    tl.store(to_at + place, tl.load(from_at + place, mask=place < count).to(tl.float32), mask=place < count)


@triton.jit
def _rotate_kernel(
    x_at, cos_at, sin_at, out_at, x_batch, x_head, x_token, out_batch, out_head, out_token,
    cos_batch, cos_token, sin_batch, sin_token, BACK: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, HEADS_AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HALF
    cos_at += batch * cos_batch + token * cos_token + column
    sin_at += batch * sin_batch + token * sin_token + column
    cos1 = tl.load(cos_at, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_at + HALF, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_at, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_at + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = out_at.dtype.element_ty
    for start in range(0, HEADS, HEADS_AT_ONCE):
        head = start + tl.arange(0, HEADS_AT_ONCE).to(tl.int64)
        mask = (head < HEADS)[:, None] & inside[None, :]
        from_at = x_at + batch * x_batch + token * x_token + head[:, None] * x_head + column[None, :]
        x1 = tl.load(from_at, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(from_at + HALF, mask=mask, other=0.0).to(tl.float32)
        # The first product is rounded as torch rounds it, so that both forms agree to the last bit.
        left, right = (x1 * cos1[None, :]).to(kind).to(tl.float32), (x2 * cos2[None, :]).to(kind).to(tl.float32)
        if BACK:
            left, right = left + x2 * sin2[None, :], right - x1 * sin1[None, :]
        else:
            left, right = left - x2 * sin1[None, :], right + x1 * sin2[None, :]
        to_at = out_at + batch * out_batch + token * out_token + head[:, None] * out_head + column[None, :]
        tl.store(to_at, left.to(kind), mask=mask)
        tl.store(to_at + HALF, right.to(kind), mask=mask)
