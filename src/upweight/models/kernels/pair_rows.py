# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Rows of tokens and rows of their experts in Triton: a token's row to each of its places, and the sum of its places.

Each is the other's gradient. torch takes a pass more for the sum, and reads a token's row once for each place.
"""

from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch

_COLUMNS = 2048  # of a row that a program takes at most


def spread_rows(row_ND: Tensor, place_S: Tensor, top_k: int) -> Tensor:
    """Return [S, D] with the row of each token at its `top_k` places; every place belongs to one token."""
    row_ND = row_ND.contiguous()
    out_SD = row_ND.new_empty(len(place_S), row_ND.shape[1])
    _launch(_spread_kernel, row_ND, out_SD, place_S, top_k)
    return out_SD


def sum_rows(row_SD: Tensor, place_S: Tensor, top_k: int) -> Tensor:
    """Return [N, D] with the sum over each token's `top_k` places, which is rounded once."""
    row_SD = row_SD.contiguous()
    out_ND = row_SD.new_empty(len(place_S) // top_k, row_SD.shape[1])
    _launch(_sum_kernel, row_SD, out_ND, place_S, top_k)
    return out_ND


def _launch(kernel: Any, rows: Tensor, out: Tensor, place_S: Tensor, top_k: int) -> None:
    columns, tokens = rows.shape[1], len(place_S) // top_k
    if not tokens:
        return
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    sizes = {"COLUMNS": columns, "TOP_K": top_k, "BLOCK": block}
    launch(kernel, (tokens, triton.cdiv(columns, block)), rows, out, place_S.contiguous(), **sizes, num_warps=4)


@triton.jit
def _spread_kernel(rows, out, places, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    values = tl.load(rows + token * COLUMNS + column, mask=inside, other=0.0)
    for number in range(TOP_K):
        place = tl.load(places + token * TOP_K + number).to(tl.int64)
        tl.store(out + place * COLUMNS + column, values, mask=inside)


@triton.jit
def _sum_kernel(rows, out, places, COLUMNS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(TOP_K):
        place = tl.load(places + token * TOP_K + number).to(tl.int64)
        total += tl.load(rows + place * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * COLUMNS + column, total.to(out.dtype.element_ty), mask=inside)
