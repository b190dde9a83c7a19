# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""The experts of a layer for the few tokens of decoding, in three Triton kernels and a sum.

Such a layer takes as long as reading the experts that a token chose. A program reads one tile of one expert's weight
for the few rows of that expert; programs of experts without rows end at once. A row is that of a pair of token and
expert and stays at its place, so nothing is sorted: the first kernel lists the pairs of each expert.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch

MOST_PAIRS, MOST_OF_EXPERT = 8192, 32  # pairs in all, and of an expert on average; beyond, weights would be read again
_FEW, _MANY = 16, 32  # rows of a tile
_LISTED = 1024  # pairs that the first kernel reads at a time
_COLUMNS, _DEPTH = 64, 64


def takes(pairs: int, experts: int) -> bool:
    """Return whether pairs are so few that the kernels here are meant for them."""
    return pairs <= min(MOST_PAIRS, MOST_OF_EXPERT * experts)


@torch.library.custom_op("upweight::few_experts", mutates_args=())
def few_experts(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up_XFD: Tensor, down_XDI: Tensor
) -> Tensor:
    """Return the sum over each token's experts of weight * down(silu(gate) * up), in the dtype of the tokens."""
    hidden_ND, index_NK, weight_NK = (x.contiguous() for x in (hidden_ND, index_NK, weight_NK))
    (tokens, top_k), (experts, width, inner) = index_NK.shape, down_XDI.shape
    pairs = tokens * top_k
    order_S = torch.empty(pairs, dtype=torch.int32, device=hidden_ND.device)
    starts_X = torch.empty(experts + 1, dtype=torch.int32, device=hidden_ND.device)
    launch(_list_kernel, (experts,), index_NK, order_S, starts_X, pairs, experts, BLOCK=_LISTED, num_warps=4)
    inner_SI, out_SD = hidden_ND.new_empty(pairs, inner), hidden_ND.new_empty(pairs, width)
    rows = _FEW if pairs <= _FEW * experts // 2 else _MANY
    sizes: dict[str, Any] = {"ROWS": rows, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH, "num_warps": 4, "num_stages": 4}
    launch(
        _gate_kernel, (triton.cdiv(inner, _COLUMNS), experts),
        hidden_ND, gate_up_XFD, weight_NK, inner_SI, order_S, starts_X, width, inner, TOP_K=top_k, **sizes,
    )  # fmt: skip
    launch(
        _down_kernel, (triton.cdiv(width, _COLUMNS), experts),
        inner_SI, down_XDI, out_SD, order_S, starts_X, inner, width, **sizes,
    )  # fmt: skip
    return out_SD.view(tokens, top_k, width).sum(1)


@few_experts.register_fake
def _shape(hidden_ND: Tensor, *_: object) -> Tensor:
    return torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)


@triton.jit
def _list_kernel(index, order, starts, pairs, experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    before = 0
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(index + pair, mask=pair < pairs, other=experts)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    for first in range(0, pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        chosen = tl.load(index + pair, mask=pair < pairs, other=experts)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order + before + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0)
        before += tl.sum(mine, 0)
    if expert == experts - 1:
        tl.store(starts + experts, before)


@triton.jit
def _gate_kernel(
    hidden, gate_up, weights, out, order, starts, depth, inner,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < inner
    gate_at = gate_up + (2 * inner * expert + column)[:, None] * depth
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        known = row < end
        pair = tl.load(order + row, mask=known, other=0).to(tl.int64)
        hidden_at = hidden + (pair // TOP_K)[:, None] * depth
        gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for below in range(0, depth, DEPTH):
            at = below + tl.arange(0, DEPTH)
            x = tl.load(hidden_at + at[None, :], mask=known[:, None] & (at < depth)[None, :], other=0.0)
            read = inside[:, None] & (at < depth)[None, :]
            gate = tl.dot(x, tl.trans(tl.load(gate_at + at[None, :], mask=read, other=0.0)), gate)
            up = tl.dot(x, tl.trans(tl.load(gate_at + inner * depth + at[None, :], mask=read, other=0.0)), up)
        weight = tl.load(weights + pair, mask=known, other=0.0).to(tl.float32)
        # As torch's products do it, each is rounded before the gate.
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        values = gate * tl.sigmoid(gate) * up * weight[:, None]
        written = known[:, None] & inside[None, :]
        tl.store(out + pair[:, None] * inner + column[None, :], values.to(out.dtype.element_ty), mask=written)


@triton.jit
def _down_kernel(
    rows, weights, out, order, starts, depth, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    weight_at = weights + (width * expert + column)[:, None] * depth
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        known = row < end
        pair = tl.load(order + row, mask=known, other=0).to(tl.int64)
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for below in range(0, depth, DEPTH):
            at = below + tl.arange(0, DEPTH)
            x = tl.load(
                rows + pair[:, None] * depth + at[None, :], mask=known[:, None] & (at < depth)[None, :], other=0.0
            )
            read = inside[:, None] & (at < depth)[None, :]
            total = tl.dot(x, tl.trans(tl.load(weight_at + at[None, :], mask=read, other=0.0)), total)
        written = known[:, None] & inside[None, :]
        tl.store(out + pair[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=written)
