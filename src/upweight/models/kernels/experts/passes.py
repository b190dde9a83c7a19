# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Passes over the rows of pairs of token and expert as Triton kernels: gates, sums by token, gradients of weights.

There are many times as many rows as tokens, so a pass costs what its bytes cost; numbers are float32 inside.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch

_ROWS, _COLUMNS = 4, 256  # of a tile of the gates
_GRADIENT_TILE = (128, 128, 32, 5, 4)  # outputs by outputs, rows at a time, stages, warps; by a sweep on an H200
_SUMMED = 1024  # columns that a program sums


def weighted_gate(both_SF: Tensor, weight_S: Tensor) -> Tensor:
    """Return silu(gate) * up * weight for rows of gate and up."""
    rows, width = len(both_SF), both_SF.shape[1] // 2
    out_SF = both_SF.new_empty(rows, width)
    if rows:
        launch(
            _gate_kernel, (triton.cdiv(rows, _ROWS),), both_SF, weight_S, out_SF, rows,
            WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return out_SF


def gate_gradients(grad_SF: Tensor, both_SF: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows of gate and up, and of the weights, from that of `weighted_gate`."""
    rows, width = grad_SF.shape
    on_both_SF, on_weight_S = torch.empty_like(both_SF), torch.empty_like(weight_S)
    if rows:
        launch(
            _gradients_kernel, (triton.cdiv(rows, _ROWS),),
            grad_SF.contiguous(), both_SF, weight_S, on_both_SF, on_weight_S, rows,
            WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return on_both_SF, on_weight_S


def sum_by_token(row_SD: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
    """Return for each token the sum of its rows, which lie at `inverse_S`."""
    tokens, width = len(inverse_S) // top_k, row_SD.shape[1]
    out_ND = row_SD.new_empty(tokens, width)
    if tokens:
        launch(
            _sum_kernel, (tokens, triton.cdiv(width, _SUMMED)), row_SD, inverse_S, out_ND,
            WIDTH=width, TOP_K=top_k, COLUMNS=_SUMMED, num_warps=4,
        )  # fmt: skip
    return out_ND


def weight_gradient(left_SM: Tensor, right_SN: Tensor, ends_X: Tensor) -> Tensor:
    """Return left' @ right of each expert's rows, in float32; rows are sorted by expert and end at `ends_X`.

    torch's grouped product gives half precision, whose cast to the float32 of masters takes longer than the product.
    """
    experts, height, width = len(ends_X), left_SM.shape[1], right_SN.shape[1]
    out_XMN = torch.empty(experts, height, width, dtype=torch.float32, device=left_SM.device)
    across, along, rows, stages, warps = _GRADIENT_TILE
    launch(
        _weight_gradient_kernel, (triton.cdiv(height, across) * triton.cdiv(width, along), experts),
        left_SM, right_SN, ends_X, out_XMN, HEIGHT=height, WIDTH=width, ACROSS=across, ALONG=along, ROWS=rows,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_XMN


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(both_at, weight_at, out_at, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    weight = tl.load(weight_at + row, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < WIDTH)[None, :]
        gate_at = both_at + row[:, None] * 2 * WIDTH + column[None, :]
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        out = gate * tl.sigmoid(gate) * up * weight[:, None]
        tl.store(out_at + row[:, None] * WIDTH + column[None, :], out.to(out_at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gradients_kernel(
    grad_at, both_at, weight_at, on_both_at, on_weight_at, rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    weight = tl.load(weight_at + row, mask=inside, other=0.0).to(tl.float32)
    on_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (column < WIDTH)[None, :]
        at = row[:, None] * 2 * WIDTH + column[None, :]
        grad = tl.load(grad_at + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(both_at + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(both_at + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        on_weight += grad * silu * up
        grad = grad * weight[:, None]
        on_gate = grad * up * (share * (1 + gate * (1 - share)))
        tl.store(on_both_at + at, on_gate.to(on_both_at.dtype.element_ty), mask=mask)
        tl.store(on_both_at + at + WIDTH, (grad * silu).to(on_both_at.dtype.element_ty), mask=mask)
    tl.store(on_weight_at + row, tl.sum(on_weight, 1).to(on_weight_at.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(row_at, inverse_at, out_at, WIDTH: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for place in tl.static_range(TOP_K):
        row = tl.load(inverse_at + token * TOP_K + place)
        total += tl.load(row_at + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_at + token * WIDTH + column, total.to(out_at.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _weight_gradient_kernel(
    left_at, right_at, ends_at, out_at, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ACROSS: tl.constexpr, ALONG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, expert = tl.program_id(0), tl.program_id(1)
    tiles: tl.constexpr = (HEIGHT + ACROSS - 1) // ACROSS
    first = tl.load(ends_at + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    end = tl.load(ends_at + expert).to(tl.int64)
    above = tile % tiles * ACROSS + tl.arange(0, ACROSS)
    beside = tile // tiles * ALONG + tl.arange(0, ALONG)
    total = tl.zeros((ACROSS, ALONG), tl.float32)
    for start in tl.range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        on_left = (row < end)[:, None] & (above < HEIGHT)[None, :]
        on_right = (row < end)[:, None] & (beside < WIDTH)[None, :]
        left = tl.load(left_at + row[:, None] * HEIGHT + above[None, :], mask=on_left, other=0.0)
        right = tl.load(right_at + row[:, None] * WIDTH + beside[None, :], mask=on_right, other=0.0)
        total = tl.dot(tl.trans(left), right, total)
    place = expert.to(tl.int64) * HEIGHT * WIDTH + above[:, None] * WIDTH + beside[None, :]
    tl.store(out_at + place, total, mask=(above < HEIGHT)[:, None] & (beside < WIDTH)[None, :])
