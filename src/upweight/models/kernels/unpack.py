# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Weights in 4 bits unpacked in one kernel, to the same numbers as by bitsandbytes in three.

A byte holds two neighbours, the first in its high bits. A weight is its place in a code, times the scale of its block;
scales may be held in 8 bits in the same way, less an offset.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch

_BLOCKS = 64  # of weights that a program unpacks


def unpack(packed: Tensor, state: Any) -> Tensor:
    """Return the weight of packed bytes and their quantisation state, in whole blocks."""
    out = torch.empty(state.shape, dtype=state.dtype, device=packed.device)
    count = out.numel() // state.blocksize
    inner, offset = (state.state2, state.offset) if state.nested else (state, state.absmax)
    launch(
        _unpack_kernel, (triton.cdiv(count, _BLOCKS),),
        packed.view(torch.uint8), state.code, state.absmax, inner.code, inner.absmax, offset, out, count,
        BLOCKS=_BLOCKS, BYTES=state.blocksize // 2, INNER=inner.blocksize if state.nested else 0,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _unpack_kernel(
    packed_at, code_at, scale_at, inner_code_at, inner_scale_at, offset_at, out_at, count,
    BLOCKS: tl.constexpr, BYTES: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    packed = tl.load(packed_at + at, mask=block[:, None] < count, other=0)
    scale = tl.load(scale_at + block, mask=block < count, other=0)
    if INNER > 0:
        inner = tl.load(inner_scale_at + block // INNER, mask=block < count, other=0.0)
        scale = tl.load(inner_code_at + scale) * inner + tl.load(offset_at)
    first = tl.load(code_at + (packed >> 4)) * scale[:, None]
    second = tl.load(code_at + (packed & 15)) * scale[:, None]
    both = tl.interleave(first, second)
    column = tl.arange(0, 2 * BYTES)
    out = block[:, None] * (2 * BYTES) + column[None, :]
    tl.store(out_at + out, both.to(out_at.dtype.element_ty), mask=block[:, None] < count)
