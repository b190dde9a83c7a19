# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Linear layers for the few rows of decoding: x W' + b + s (x A') B' in one Triton kernel.

Such a product takes as long as reading W. A program reads one tile of W and the same columns of A, so the adapter needs
no further launch; layers that read the same input share a launch. Columns are split over programs until they fill the
GPU; the last program to finish a tile sums the partial results, always in the same order.

An RMS norm of the input and a residual that the output is added to need no launch either: the kernel that writes a row
also writes it multiplied with the norm's weight, and the sums of its squares by tile. The kernel that reads this row
adds the squares up, and multiplies its sums with what is left of the norm, a factor by row.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch
from upweight.models.kernels.multiply import (
    add_product,
    add_products_of_pairs,
    load_part,
    load_squares,
    load_tile,
    normed,
    scaled,
)
from upweight.models.kernels.tiles import GatedTile, Tile, tile_of

Tensors = list[Tensor]
MOST_RANK, MOST_LAYERS = 64, 3
_SMALLEST_SIDE = 16  # of a matrix product on tensor cores
_LEFT_ROWS = 64  # of the left factor, which the fastest matrix instructions take


class InputNorm(NamedTuple):
    """What is left of an RMS norm of an input: 1 / the root of the mean square, whose squares are summed by tile.

    The input is multiplied with the norm's weight already; squares are those before that.
    """

    epsilon: float
    squares_TN: Tensor


class Outputs(NamedTuple):
    """Outputs of layers; of one with a residual also squares by tile, and the output times the next norm's weight."""

    out_NF: Tensor
    squares_TN: Tensor
    weighted_NF: Tensor | None


@torch.library.custom_op("upweight::few_rows_linears", mutates_args=())
def few_rows_linears(
    x_ND: Tensor, weights: Tensors, biases: Tensors, downs: Tensors, ups: Tensors, scalings: list[float]
) -> Tensor:
    """Return the concatenated outputs of layers for rows of x, best at most `most_rows`."""
    return linears(x_ND, weights, biases, downs, ups, scalings).out_NF


def linears(
    x_ND: Tensor,
    weights: Tensors,
    biases: Tensors,
    downs: Tensors,
    ups: Tensors,
    scalings: list[float],
    norm: InputNorm | None = None,
    residual_NF: Tensor | None = None,
    next_weight: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> Outputs:
    """Return the concatenated outputs of layers for rows of x; a residual is added to those of one layer.

    `next_weight`: the weight of the norm that comes after the residual; `scales`: weights are pairs of integers of 8
    bits, which these multiply by output.
    """
    # All layers, or none, have a bias; all, or none, have an adapter of the same rank.
    x_ND = x_ND.contiguous()
    count, depth = x_ND.shape
    widths = [len(weight) for weight in weights]
    pairs = depth // 2 if scales else depth  # or inputs, of which a program adds up some
    rank = len(downs[0]) if downs else 0
    tile = tile_of(count, pairs, widths, _processors(x_ND.device), rank=rank, int8=bool(scales))
    rows, columns, block, each, stages, warps = tile
    width, below, parts = sum(widths), triton.cdiv(count, rows), triton.cdiv(pairs, each)
    tiles = [triton.cdiv(one, columns) for one in widths]
    out = torch.empty(count, width, dtype=x_ND.dtype, device=x_ND.device)
    partials = torch.empty(sum(tiles) * below * parts * rows * columns, dtype=torch.float32, device=x_ND.device)
    residual = residual_NF is not None
    weighted_NF = None if next_weight is None else torch.empty_like(out)
    squares_TN = torch.empty(sum(tiles) if residual else 0, count, dtype=torch.float32, device=x_ND.device)
    launch(
        _linears_kernel, (sum(tiles) * parts, below),
        x_ND, *_three(weights), *_three(biases or [x_ND]), *_three(downs or [x_ND]), *_three(ups or [x_ND]),
        *_three(scales or [partials]), out, partials, _counters(x_ND.device), count, *_three(widths), depth, each,
        parts, *_three(scalings or [0.0]), *norm_arguments(norm, x_ND), residual_NF if residual else out, squares_TN,
        out if next_weight is None else next_weight, out if weighted_NF is None else weighted_NF,
        LAYERS=len(weights), SPLIT=parts > 1, ROWS=rows, COLUMNS=columns, DEPTH=block,
        RANK=rank, RANK_UP=side_of(rank), BIAS=bool(biases), NORM=tiles_of_norm(norm), RESIDUAL=residual,
        WEIGHTED=weighted_NF is not None, SCALED=bool(scales), SWAPPED=is_swapped(tile, scales),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return Outputs(out, squares_TN, weighted_NF)


def norm_arguments(norm: InputNorm | None, x_ND: Tensor) -> tuple[Tensor, int, float]:
    """Return a kernel's arguments about a norm; any tensor is taken where there is none."""
    return (x_ND, 0, 0.0) if norm is None else (norm.squares_TN, len(norm.squares_TN), norm.epsilon)


def is_swapped(tile: Tile | GatedTile, scales: Sequence[Tensor]) -> bool:
    """Return whether W x' is computed in place of x W'.

    The left factor needs more rows than few rows of x are, and only that one may be in registers, where integers are
    converted.
    """
    return tile.columns >= _LEFT_ROWS and (tile.rows < _LEFT_ROWS or bool(scales))


def tiles_of_norm(norm: InputNorm | None) -> int:
    """Return how many tiles of squares a kernel reads, rounded up to a power of 2."""
    return 0 if norm is None else triton.next_power_of_2(len(norm.squares_TN))


@few_rows_linears.register_fake
def _shape(x_ND: Tensor, weights: list[Tensor], *_: object) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], sum(weight.shape[0] for weight in weights))


def side_of(rank: int) -> int:
    """Return the side of a matrix product that holds the rank of an adapter."""
    return max(_SMALLEST_SIDE, triton.next_power_of_2(rank))


def _three(of: Sequence[Any]) -> list[Any]:
    """Repeat the values of one, two or three layers to fill a kernel's three arguments."""
    return (list(of) * MOST_LAYERS)[:MOST_LAYERS]


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _counters(device: torch.device) -> Tensor:
    """Return the counters of finished programs for each tile; zero between launches."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


@triton.jit
def _summed_parts(first_at, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the partial results of a tile, which are stored one after the other."""
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in range(parts):
        sums += tl.load(first_at + part * ROWS * COLUMNS)
    return sums


@triton.jit
def _store_rows(
    sums, bias_at, out_at, residual_at, squares_at, next_at, weighted_at, row, count, column, width, before, total,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Store a tile of the output, added to a residual if there is one, and then what the next norm needs of it."""
    if BIAS:
        sums += tl.load(bias_at + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    inside = (row[:, None] < count) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * total + before + column[None, :]
    out = sums.to(out_at.dtype.element_ty)
    if RESIDUAL:  # added to the rounded output, as in training
        residual = tl.load(residual_at + place, mask=inside, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + residual).to(out_at.dtype.element_ty)
        squares = tl.sum(tl.where(inside, out.to(tl.float32) * out.to(tl.float32), 0.0), 1)
        tl.store(squares_at + row, squares, mask=row < count)
    if WEIGHTED:
        weight = tl.load(next_at + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(weighted_at + place, (out.to(tl.float32) * weight[None, :]).to(out.dtype), mask=inside)
    tl.store(out_at + place, out, mask=inside)


@triton.jit
def _added_up(
    x_at, weight_at, down_at, row, count, column, width, begin, end, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, RANK_UP: tl.constexpr,
    SCALED: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return the products of rows of x with a weight and with an adapter's first half, over some inputs or pairs."""
    in_rank = tl.arange(0, RANK_UP)
    sums = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    pairs = depth // 2 if SCALED else depth
    for start in range(begin, tl.minimum(end, pairs), DEPTH):
        at = start + tl.arange(0, DEPTH)
        if SCALED:
            x = load_part(x_at, row, count, at, pairs, depth)
            second = load_tile(x_at, row, count, at + pairs, depth)
            sums = add_products_of_pairs(x, second, load_tile(weight_at, column, width, at, pairs), sums, SWAPPED)
            if RANK > 0:
                narrow = tl.dot(second, tl.trans(load_tile(down_at, in_rank, RANK, at + pairs, depth)), narrow)
        else:
            x = load_tile(x_at, row, count, at, depth)
            sums = add_product(x, load_tile(weight_at, column, width, at, depth), sums, SWAPPED)
        if RANK > 0:
            narrow = tl.dot(x, tl.trans(load_tile(down_at, in_rank, RANK, at, depth)), narrow)
    return sums, narrow


# Rows have no meaning for alignment; specialised, each kind of number would be compiled for itself.
@triton.jit(do_not_specialize=["count", "parts", "square_tiles"])
def _linears_kernel(
    x_at, weight_at, weight_1, weight_2, bias_at, bias_1, bias_2, down_at, down_1, down_2, up_at, up_1, up_2,
    scale_at, scale_1, scale_2, out_at, partials_at, counters, count, width, width_1, width_2, depth, each, parts,
    scaling, scaling_1, scaling_2, squares_at, square_tiles, epsilon, residual_at, new_squares_at, next_at, weighted_at,
    LAYERS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RANK: tl.constexpr, RANK_UP: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0) % parts, tl.program_id(0) // parts
    layer_tile, before, total = tile, 0, width
    if LAYERS > 1:
        tiles, total = tl.cdiv(width, COLUMNS), total + width_1
        if layer_tile >= tiles:
            layer_tile, before = layer_tile - tiles, width
            weight_at, bias_at, down_at, up_at, width, scaling = weight_1, bias_1, down_1, up_1, width_1, scaling_1
            scale_at = scale_1
    if LAYERS > 2:
        tiles, total = tl.cdiv(width_1, COLUMNS), total + width_2
        if (before > 0) & (layer_tile >= tiles):
            layer_tile, before = layer_tile - tiles, before + width_1
            weight_at, bias_at, down_at, up_at, width, scaling = weight_2, bias_2, down_2, up_2, width_2, scaling_2
            scale_at = scale_2
    column = layer_tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    squares = load_squares(squares_at, square_tiles, row, count, NORM)
    sums, narrow = _added_up(
        x_at, weight_at, down_at, row, count, column, width, part * each, part * each + each, depth,
        ROWS, COLUMNS, DEPTH, RANK, RANK_UP, SCALED, SWAPPED,
    )  # fmt: skip
    sums = scaled(sums, scale_at, column, width, SCALED, SWAPPED)
    if RANK > 0:
        up = load_tile(up_at, column, width, in_rank, RANK)
        sums += tl.dot(narrow.to(up.dtype), tl.trans(up)) * scaling
    last = True
    if SPLIT:
        index = tl.program_id(1) * (tl.num_programs(0) // parts) + tile
        cell = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(partials_at + (index * parts + part) * ROWS * COLUMNS + cell, sums)
        tl.debug_barrier()
        last = tl.atomic_add(counters + index, 1, sem="acq_rel") == parts - 1
        if last:
            sums = _summed_parts(partials_at + index * parts * ROWS * COLUMNS + cell, parts, ROWS, COLUMNS)
            tl.store(counters + index, 0)
    if last:
        _store_rows(
            normed(sums, squares, depth, epsilon, NORM), bias_at, out_at, residual_at, new_squares_at + tile * count,
            next_at, weighted_at, row, count, column, width, before, total, BIAS, RESIDUAL, WEIGHTED,
        )  # fmt: skip
