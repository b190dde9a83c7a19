# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Linear layers for the few rows of decoding: x W' + b + s (x A') B' in one Triton kernel.

Such a product takes as long as reading W. A program reads one tile of W and the same columns of A, so the adapter needs
no further launch; layers that read the same input share a launch. Columns are split over programs until they fill the
GPU; the last program to finish a tile sums the partial results, always in the same order.

For more rows torch's products are faster, and only the adapters' terms of a gated product are added here.
"""

from functools import cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

Tensors = list[Tensor]
# Beyond FEW_ROWS the weights would be read again for each further tile of rows. A product of few multiplications is
# bound by its launches instead, so that one launch wins up to _MOST_ROWS: `python -m bench.gpu_kernels` prints it.
FEW_ROWS, MOST_RANK, MOST_LAYERS = 64, 64, 3
_MOST_ROWS, _MOST_MULTIPLICATIONS = 512, 3_000_000_000
MIN_GATED_OUTPUTS = 4096  # outputs below which the tiles of a gated product would not fill a GPU
_ROWS, _DEPTH, _GATED_DEPTH = 64, 128, 64
_WIDE = 4096  # inputs or outputs from which on a tile has twice the columns
_SMALLEST_SIDE = 16  # of a matrix product on tensor cores
_MOST_PARTS = 8


def most_rows(depth: int, width: int) -> int:
    """Return up to how many rows a layer of this width is faster here than torch's products, measured on an H200."""
    return max(FEW_ROWS, min(_MOST_ROWS, _MOST_MULTIPLICATIONS // (depth * width)))


@torch.library.custom_op("upweight::few_rows_linears", mutates_args=())
def few_rows_linears(
    x_ND: Tensor, weights: Tensors, biases: Tensors, downs: Tensors, ups: Tensors, scalings: list[float]
) -> Tensor:
    """Return the concatenated outputs of layers for rows of x, best at most `most_rows`."""
    # All layers, or none, have a bias; all, or none, have an adapter of the same rank.
    x_ND = x_ND.contiguous()
    count, depth = x_ND.shape
    rows = min(_ROWS, max(_SMALLEST_SIDE, triton.next_power_of_2(count)))
    width = sum(len(weight) for weight in weights)
    below, processors = triton.cdiv(count, rows), _processors(x_ND.device)
    columns = 64 if max(width, depth) > _WIDE or below * triton.cdiv(width, 32) > processors else 32
    tiles = [triton.cdiv(len(weight), columns) for weight in weights]
    block = _DEPTH if sum(tiles) * below <= processors else _DEPTH // 2  # a processor holds two of the smaller ones
    wanted = max(1, processors // (sum(tiles) * below))
    each = triton.cdiv(triton.cdiv(depth, min(wanted, _MOST_PARTS)), block) * block
    parts = triton.cdiv(depth, each)
    out = torch.empty(count, width, dtype=x_ND.dtype, device=x_ND.device)
    partials = torch.empty(sum(tiles) * below * parts * rows * columns, dtype=torch.float32, device=x_ND.device)
    rank = len(downs[0]) if downs else 0
    launch: Any = _kernel
    launch[(sum(tiles) * parts, below)](
        x_ND, *_three(weights), *_three(biases or weights), *_three(downs or weights), *_three(ups or weights),
        out, partials, _counters(x_ND.device), count, *_three([len(weight) for weight in weights]), depth, each,
        *_three(scalings or [0.0]),
        LAYERS=len(weights), PARTS=parts, ROWS=rows, COLUMNS=columns, DEPTH=block,
        RANK=rank, RANK_UP=_side(rank), BIAS=bool(biases), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@few_rows_linears.register_fake
def _shape(x_ND: Tensor, weights: list[Tensor], *_: object) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], sum(weight.shape[0] for weight in weights))


@torch.library.custom_op("upweight::few_rows_gated", mutates_args=())
def few_rows_gated(x_ND: Tensor, weights: Tensors, downs: Tensors, ups: Tensors, scalings: list[float]) -> Tensor:
    """Compute silu(gate) * up for few rows of x: two layers without bias, both or none with an adapter."""
    x_ND = x_ND.contiguous()
    count, depth = x_ND.shape
    rows = min(_ROWS, max(_SMALLEST_SIDE, triton.next_power_of_2(count)))
    width, rank = len(weights[0]), len(downs[0]) if downs else 0
    columns = 64 if rank else 32
    out = torch.empty(count, width, dtype=x_ND.dtype, device=x_ND.device)
    launch: Any = _gated_kernel
    launch[(triton.cdiv(width, columns), triton.cdiv(count, rows))](
        x_ND, *weights, *(downs or weights), *(ups or weights), out, count, width, depth, *(scalings or [0.0, 0.0]),
        ROWS=rows, COLUMNS=columns, DEPTH=_GATED_DEPTH, RANK=rank, RANK_UP=_side(rank),
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@few_rows_gated.register_fake
def _gated_shape(x_ND: Tensor, weights: list[Tensor], *_: object) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weights[0].shape[0])


@torch.library.custom_op("upweight::gated_terms", mutates_args=())
def gated_terms(gate_NF: Tensor, up_NF: Tensor, narrow_NR: Tensor, ups: list[Tensor], scalings: list[float]) -> Tensor:
    """Compute silu(gate) * up from two layers' outputs and the concatenated x A' of their adapters, for any rows."""
    out = torch.empty_like(gate_NF)
    (count, width), rank = gate_NF.shape, ups[0].shape[1]
    launch: Any = _gated_lora_kernel
    launch[(triton.cdiv(width, 128), triton.cdiv(count, 32))](
        gate_NF, up_NF, narrow_NR, *ups, out, count, width, *scalings,
        ROWS=32, COLUMNS=128, RANK=rank, RANK_UP=_side(rank), num_warps=4,
    )  # fmt: skip
    return out


@gated_terms.register_fake
def _terms_shape(gate_NF: Tensor, *_: object) -> Tensor:
    return torch.empty_like(gate_NF)


def _side(rank: int) -> int:
    return max(_SMALLEST_SIDE, triton.next_power_of_2(rank))


def _three(of: list[Any]) -> list[Any]:
    """Repeat the values of one, two or three layers to fill a kernel's three arguments."""
    return (of * MOST_LAYERS)[:MOST_LAYERS]


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished programs for each tile; zero between launches."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


@triton.jit
def _load_tile(at, row, rows, column, columns):
    """Load the elements [row, column] of a matrix with `columns` columns; zero outside."""
    return tl.load(
        at + row[:, None].to(tl.int64) * columns + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < columns), other=0.0,
    )  # fmt: skip


@triton.jit
def _summed_parts(first_at, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the partial results of a tile, which are stored one after the other."""
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(PARTS):
        sums += tl.load(first_at + part * ROWS * COLUMNS)
    return sums


@triton.jit
def _kernel(
    x_at, weight_at, weight_1, weight_2, bias_at, bias_1, bias_2, down_at, down_1, down_2, up_at, up_1, up_2,
    out_at, partials_at, counters, count, width, width_1, width_2, depth, each, scaling, scaling_1, scaling_2,
    LAYERS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RANK: tl.constexpr, RANK_UP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    layer_tile, before, total = tile, 0, width
    if LAYERS > 1:
        tiles, total = tl.cdiv(width, COLUMNS), total + width_1
        if layer_tile >= tiles:
            layer_tile, before = layer_tile - tiles, width
            weight_at, bias_at, down_at, up_at, width, scaling = weight_1, bias_1, down_1, up_1, width_1, scaling_1
    if LAYERS > 2:
        tiles, total = tl.cdiv(width_1, COLUMNS), total + width_2
        if (before > 0) & (layer_tile >= tiles):
            layer_tile, before = layer_tile - tiles, before + width_1
            weight_at, bias_at, down_at, up_at, width, scaling = weight_2, bias_2, down_2, up_2, width_2, scaling_2
    column = layer_tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    for start in range(part * each, tl.minimum(part * each + each, depth), DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = _load_tile(x_at, row, count, at, depth)
        sums = tl.dot(x, tl.trans(_load_tile(weight_at, column, width, at, depth)), sums)
        if RANK > 0:
            narrow = tl.dot(x, tl.trans(_load_tile(down_at, in_rank, RANK, at, depth)), narrow)
    if RANK > 0:
        up = _load_tile(up_at, column, width, in_rank, RANK)
        sums += tl.dot(narrow.to(up.dtype), tl.trans(up)) * scaling
    last = True
    if PARTS > 1:
        index = tl.program_id(1) * (tl.num_programs(0) // PARTS) + tile
        cell = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(partials_at + (index * PARTS + part) * ROWS * COLUMNS + cell, sums)
        tl.debug_barrier()
        last = tl.atomic_add(counters + index, 1, sem="acq_rel") == PARTS - 1
        if last:
            sums = _summed_parts(partials_at + index * PARTS * ROWS * COLUMNS + cell, PARTS, ROWS, COLUMNS)
            tl.store(counters + index, 0)
    if last:
        if BIAS:
            sums += tl.load(bias_at + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out_at + row[:, None] * total + before + column[None, :], sums.to(out_at.dtype.element_ty),
            mask=(row[:, None] < count) & (column[None, :] < width),
        )  # fmt: skip


@triton.jit
def _gated_kernel(
    x_at, gate_at, up_at, gate_down, up_down, gate_up, up_up, out_at, count, width, depth, gate_scaling, up_scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, RANK_UP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate_narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    up_narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = _load_tile(x_at, row, count, at, depth)
        gate = tl.dot(x, tl.trans(_load_tile(gate_at, column, width, at, depth)), gate)
        up = tl.dot(x, tl.trans(_load_tile(up_at, column, width, at, depth)), up)
        if RANK > 0:
            gate_narrow = tl.dot(x, tl.trans(_load_tile(gate_down, in_rank, RANK, at, depth)), gate_narrow)
            up_narrow = tl.dot(x, tl.trans(_load_tile(up_down, in_rank, RANK, at, depth)), up_narrow)
    if RANK > 0:
        wide = _load_tile(gate_up, column, width, in_rank, RANK)
        gate += tl.dot(gate_narrow.to(wide.dtype), tl.trans(wide)) * gate_scaling
        wide = _load_tile(up_up, column, width, in_rank, RANK)
        up += tl.dot(up_narrow.to(wide.dtype), tl.trans(wide)) * up_scaling
    _store_gated(gate, up, out_at, row, count, column, width)


@triton.jit
def _store_gated(gate, up, out_at, row, count, column, width):
    dtype = out_at.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)  # rounded as the layers' outputs are in training
    gated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(
        out_at + row[:, None].to(tl.int64) * width + column[None, :], gated.to(dtype),
        mask=(row[:, None] < count) & (column[None, :] < width),
    )  # fmt: skip


@triton.jit
def _gated_lora_kernel(
    gate_at, up_at, narrow_at, gate_up, up_up, out_at, count, width, gate_scaling, up_scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_UP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    gate = _load_tile(gate_at, row, count, column, width).to(tl.float32)
    up = _load_tile(up_at, row, count, column, width).to(tl.float32)
    inside = (row[:, None] < count) & (in_rank[None, :] < RANK)
    narrow_at += row[:, None] * 2 * RANK + in_rank[None, :]
    narrow = tl.load(narrow_at, mask=inside, other=0.0)
    gate += tl.dot(narrow, tl.trans(_load_tile(gate_up, column, width, in_rank, RANK))) * gate_scaling
    narrow = tl.load(narrow_at + RANK, mask=inside, other=0.0)
    up += tl.dot(narrow, tl.trans(_load_tile(up_up, column, width, in_rank, RANK))) * up_scaling
    _store_gated(gate, up, out_at, row, count, column, width)
