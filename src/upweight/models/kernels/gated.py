# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""Gated products of decoding: silu(gate(x)) * up(x) in one Triton kernel for few rows of x.

For more rows torch's products are faster, and only the adapters' terms are added here.
"""

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch
from upweight.models.kernels.linear import InputNorm, is_swapped, norm_arguments, side_of, tiles_of_norm
from upweight.models.kernels.multiply import (
    add_product,
    add_products_of_pairs,
    load_part,
    load_squares,
    load_tile,
    normed,
    scaled,
)
from upweight.models.kernels.tiles import gated_tile_of

Tensors = list[Tensor]


@torch.library.custom_op("upweight::few_rows_gated", mutates_args=())
def few_rows_gated(x_ND: Tensor, weights: Tensors, downs: Tensors, ups: Tensors, scalings: list[float]) -> Tensor:
    """Compute silu(gate) * up for few rows of x: two layers without bias, both or none with an adapter."""
    return gated_linears(x_ND, weights, downs, ups, scalings)


def gated_linears(
    x_ND: Tensor,
    weights: Tensors,
    downs: Tensors,
    ups: Tensors,
    scalings: list[float],
    norm: InputNorm | None = None,
    scales: Sequence[Tensor] = (),
) -> Tensor:
    """Compute silu(gate) * up for few rows of x; `norm` and `scales` as in `linears`."""
    x_ND = x_ND.contiguous()
    count, depth = x_ND.shape
    width, rank = len(weights[0]), len(downs[0]) if downs else 0
    tile = gated_tile_of(count, width, rank=rank, int8=bool(scales))
    rows, columns, block, stages, warps = tile
    out = torch.empty(count, width, dtype=x_ND.dtype, device=x_ND.device)
    launch(
        _gated_kernel, (triton.cdiv(width, columns), triton.cdiv(count, rows)),
        x_ND, *weights, *(downs or [x_ND] * 2), *(ups or [x_ND] * 2), *(scales or [x_ND] * 2), out, count, width, depth,
        *(scalings or [0.0, 0.0]), *norm_arguments(norm, x_ND),
        ROWS=rows, COLUMNS=columns, DEPTH=block, RANK=rank, RANK_UP=side_of(rank), NORM=tiles_of_norm(norm),
        SCALED=bool(scales), SWAPPED=is_swapped(tile, scales),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@few_rows_gated.register_fake
def _gated_shape(x_ND: Tensor, weights: list[Tensor], *_: object) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weights[0].shape[0])


@torch.library.custom_op("upweight::gated_terms", mutates_args=())
def gated_terms(gate_NF: Tensor, up_NF: Tensor, narrow_NR: Tensor, ups: list[Tensor], scalings: list[float]) -> Tensor:
    """Compute silu(gate) * up from two layers' outputs and the concatenated x A' of their adapters, for any rows.

    Without adapters `ups` is empty, and any tensor is taken for `narrow_NR`.
    """
    out = torch.empty_like(gate_NF)
    (count, width), rank = gate_NF.shape, ups[0].shape[1] if ups else 0
    launch(
        _gated_lora_kernel, (triton.cdiv(width, 128), triton.cdiv(count, 32)),
        gate_NF, up_NF, narrow_NR, *(ups or [gate_NF, up_NF]), out, count, width, *(scalings or [0.0, 0.0]),
        ROWS=32, COLUMNS=128, RANK=rank, RANK_UP=side_of(rank), num_warps=4,
    )  # fmt: skip
    return out


@gated_terms.register_fake
def _terms_shape(gate_NF: Tensor, *_: object) -> Tensor:
    return torch.empty_like(gate_NF)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up of two tensors of one shape, in float32 inside."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    launch(_silu_kernel, (triton.cdiv(gate.numel(), 1024),), gate, up, out, gate.numel(), BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _silu_kernel(gate_at, up_at, out_at, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_at + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_at + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_at + at, (gate * tl.sigmoid(gate) * up).to(out_at.dtype.element_ty), mask=at < count)


def silu_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return silu(gate) * up and the gradients of gate and up, written over grad, gate and up."""
    gate, up, grad = gate.contiguous(), up.contiguous(), grad.contiguous()
    grid = (triton.cdiv(gate.numel(), 1024),)
    launch(_silu_gradients_kernel, grid, gate, up, grad, gate.numel(), BLOCK=1024, num_warps=4)
    return grad, gate, up


@triton.jit
def _silu_gradients_kernel(gate_at, up_at, grad_at, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_at + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(up_at + at, mask=at < count, other=0.0).to(tl.float32)
    grad = tl.load(grad_at + at, mask=at < count, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    on_gate, on_up = grad * up * (share * (1 + gate * (1 - share))), grad * (gate * share)
    dtype = grad_at.dtype.element_ty
    tl.store(grad_at + at, (gate * share * up).to(dtype), mask=at < count)
    tl.store(gate_at + at, on_gate.to(dtype), mask=at < count)
    tl.store(up_at + at, on_up.to(dtype), mask=at < count)


@triton.jit(do_not_specialize=["count", "square_tiles"])
def _gated_kernel(
    x_at, gate_at, up_at, gate_down, up_down, gate_up, up_up, gate_scale, up_scale, out_at, count, width, depth,
    gate_scaling, up_scaling, squares_at, square_tiles, epsilon,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr, RANK_UP: tl.constexpr,
    NORM: tl.constexpr, SCALED: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    squares = load_squares(squares_at, square_tiles, row, count, NORM)
    gate = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    gate_narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    up_narrow = tl.zeros((ROWS, RANK_UP), tl.float32)
    pairs = depth // 2 if SCALED else depth
    for start in range(0, pairs, DEPTH):
        at = start + tl.arange(0, DEPTH)
        if SCALED:
            x = load_part(x_at, row, count, at, pairs, depth)
            second = load_tile(x_at, row, count, at + pairs, depth)
            gate = add_products_of_pairs(x, second, load_tile(gate_at, column, width, at, pairs), gate, SWAPPED)
            up = add_products_of_pairs(x, second, load_tile(up_at, column, width, at, pairs), up, SWAPPED)
            if RANK > 0:
                down = load_tile(gate_down, in_rank, RANK, at + pairs, depth)
                gate_narrow = tl.dot(second, tl.trans(down), gate_narrow)
                down = load_tile(up_down, in_rank, RANK, at + pairs, depth)
                up_narrow = tl.dot(second, tl.trans(down), up_narrow)
        else:
            x = load_tile(x_at, row, count, at, depth)
            gate = add_product(x, load_tile(gate_at, column, width, at, depth), gate, SWAPPED)
            up = add_product(x, load_tile(up_at, column, width, at, depth), up, SWAPPED)
        if RANK > 0:
            gate_narrow = tl.dot(x, tl.trans(load_tile(gate_down, in_rank, RANK, at, depth)), gate_narrow)
            up_narrow = tl.dot(x, tl.trans(load_tile(up_down, in_rank, RANK, at, depth)), up_narrow)
    gate = scaled(gate, gate_scale, column, width, SCALED, SWAPPED)
    up = scaled(up, up_scale, column, width, SCALED, SWAPPED)
    if RANK > 0:
        wide = load_tile(gate_up, column, width, in_rank, RANK)
        gate += tl.dot(gate_narrow.to(wide.dtype), tl.trans(wide)) * gate_scaling
        wide = load_tile(up_up, column, width, in_rank, RANK)
        up += tl.dot(up_narrow.to(wide.dtype), tl.trans(wide)) * up_scaling
    gate, up = normed(gate, squares, depth, epsilon, NORM), normed(up, squares, depth, epsilon, NORM)
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


@triton.jit(do_not_specialize=["count"])
def _gated_lora_kernel(
    gate_at, up_at, narrow_at, gate_up, up_up, out_at, count, width, gate_scaling, up_scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, RANK_UP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_rank = tl.arange(0, RANK_UP)
    gate = load_tile(gate_at, row, count, column, width).to(tl.float32)
    up = load_tile(up_at, row, count, column, width).to(tl.float32)
    if RANK > 0:
        inside = (row[:, None] < count) & (in_rank[None, :] < RANK)
        narrow_at += row[:, None] * 2 * RANK + in_rank[None, :]
        narrow = tl.load(narrow_at, mask=inside, other=0.0)
        gate += tl.dot(narrow, tl.trans(load_tile(gate_up, column, width, in_rank, RANK))) * gate_scaling
        narrow = tl.load(narrow_at + RANK, mask=inside, other=0.0)
        up += tl.dot(narrow, tl.trans(load_tile(up_up, column, width, in_rank, RANK))) * up_scaling
    _store_gated(gate, up, out_at, row, count, column, width)
