# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""A linear layer with its adapter for few rows, as decoding has them: x W' + b + s (x A') B' in one Triton kernel.

Such a product takes as long as reading W. A program reads one piece of W and the same columns of A beside it, so the
adapter costs no launch of its own. Columns are split over programs until they fill the GPU; the last one to finish a
tile adds up what the others left, always in the same order.
"""

from functools import cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

MOST_ROWS, MOST_RANK = 128, 64  # beyond, products apart are as fast
_ROWS, _DEPTH = 64, 64
_WIDE = 4096  # outputs from which on a tile has twice the columns
_SMALLEST_SIDE = 16  # of a matrix product on tensor cores
_MOST_PARTS = 8


@torch.library.custom_op("upweight::low_rank_linear", mutates_args=())
def low_rank_linear(
    x_ND: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
) -> Tensor:
    """Rows of x, at most `MOST_ROWS`, through the layer `weight`, `bias` and the adapter `down`, `up`."""
    x_ND, weight, down, up = (tensor.contiguous() for tensor in (x_ND, weight, down, up))
    count, depth = x_ND.shape
    width, rank = up.shape
    rows = min(_ROWS, max(_SMALLEST_SIDE, triton.next_power_of_2(count)))
    columns = 64 if width > _WIDE else 32
    tiles = triton.cdiv(width, columns), triton.cdiv(count, rows)
    wanted = max(1, 2 * _processors(x_ND.device) // (tiles[0] * tiles[1]))
    each = triton.cdiv(triton.cdiv(depth, min(wanted, _MOST_PARTS)), _DEPTH) * _DEPTH
    parts = triton.cdiv(depth, each)
    out = torch.empty(count, width, dtype=x_ND.dtype, device=x_ND.device)
    left = torch.empty(tiles[0] * tiles[1] * parts * rows * columns, dtype=torch.float32, device=x_ND.device)
    launch: Any = _kernel
    launch[(tiles[0] * parts, tiles[1])](
        x_ND, weight, bias if bias is not None else weight, down, up, out, left, _counters(x_ND.device),
        count, width, depth, each, scaling,
        PARTS=parts, ROWS=rows, COLUMNS=columns, DEPTH=_DEPTH,
        RANK=rank, RANK_UP=max(_SMALLEST_SIDE, triton.next_power_of_2(rank)), BIAS=bias is not None,
        num_warps=4, num_stages=5,
    )  # fmt: skip
    return out


@low_rank_linear.register_fake
def _shape(x_ND: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], up.shape[0])


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _counters(device: torch.device) -> Tensor:
    """How many programs of each tile are done; zero between launches."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


@triton.jit
def _kernel(
    x_at, weight_at, bias_at, down_at, up_at, out_at, left_at, counters,
    count, width, depth, each, scaling,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RANK: tl.constexpr, RANK_UP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % PARTS
    column = tl.program_id(0) // PARTS * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, depth), DEPTH):
        at = start + tl.arange(0, DEPTH)
        inside = at[None, :] < depth
        x = tl.load(x_at + row[:, None] * depth + at[None, :], mask=(row[:, None] < count) & inside, other=0.0)
        weight = tl.load(
            weight_at + column[:, None].to(tl.int64) * depth + at[None, :],
            mask=(column[:, None] < width) & inside, other=0.0,
        )  # fmt: skip
        down = tl.load(
            down_at + in_rank[:, None] * depth + at[None, :], mask=(in_rank[:, None] < RANK) & inside, other=0.0
        )
        sums = tl.dot(x, tl.trans(weight), sums)
        narrow = tl.dot(x, tl.trans(down), narrow)
    up = tl.load(
        up_at + column[:, None] * RANK + in_rank[None, :],
        mask=(column[:, None] < width) & (in_rank[None, :] < RANK), other=0.0,
    )  # fmt: skip
    sums += tl.dot(narrow.to(up.dtype), tl.trans(up)) * scaling
    last = True
    if PARTS > 1:
        tile = tl.program_id(1) * (tl.num_programs(0) // PARTS) + tl.program_id(0) // PARTS
        cell = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(left_at + (tile * PARTS + part) * ROWS * COLUMNS + cell, sums)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1
        if last:
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for other in range(PARTS):
                sums += tl.load(left_at + (tile * PARTS + other) * ROWS * COLUMNS + cell)
            tl.store(counters + tile, 0)
    if last:
        if BIAS:
            sums += tl.load(bias_at + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_at + row[:, None] * width + column[None, :], sums.to(out_at.dtype.element_ty),
            mask=(row[:, None] < count) & (column[None, :] < width),
        )  # fmt: skip
