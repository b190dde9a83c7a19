# ruff: noqa: ANN001, ANN201, PLR0917  (parts of kernels take pointers and numbers, each by its place)
"""Parts of the kernels of linear layers: tiles of matrices, their products, and what is left of a norm.

A product is swapped where the weight is the left factor, so that sums are stored [columns, rows]. Tensor cores read the
left factor from registers if need be, where integers are converted; they read the right one from shared memory.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

# A register holds the pairs of two inputs: four integers of 8 bits. Of one byte of each pair 128 + the low 7 bits is
# made by giving it the exponent of 128, and 128 or 256 by its sign; the difference is the integer, without rounding.
_TO_BFLOAT16 = """{{
    .reg .b32 bytes, low, sign, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 bytes, $1, 0x43434343, {bytes};
    and.b32 low, bytes, 0xFF7FFF7F;
    lop3.b32 sign, bytes, 0xFF80FF80, 0x80008000, 0xEA;
    fma.rn.bf16x2 $0, low, one, sign;
}}"""
_LOW = tl.constexpr(_TO_BFLOAT16.format(bytes="0x4240"))
_HIGH = tl.constexpr(_TO_BFLOAT16.format(bytes="0x4341"))


@triton.jit
def load_part(at, row, rows, column, last, columns):
    """Load the elements [row, column] of a matrix with `columns` columns, before the column `last`; zero outside."""
    return tl.load(
        at + row[:, None].to(tl.int64) * columns + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < last), other=0.0,
    )  # fmt: skip


@triton.jit
def load_tile(at, row, rows, column, columns):
    """Load the elements [row, column] of a matrix with `columns` columns; zero outside."""
    return load_part(at, row, rows, column, columns, columns)


@triton.jit
def add_product(x, weight, sums, SWAPPED: tl.constexpr):
    """Add x W' to the sums, or W x' to swapped ones."""
    return tl.dot(weight, tl.trans(x), sums) if SWAPPED else tl.dot(x, tl.trans(weight), sums)


@triton.jit
def add_products_of_pairs(first, second, pairs, sums, SWAPPED: tl.constexpr):
    """Add the products of a weight's two halves, whose integers stand in pairs, with the two halves of x."""
    if first.dtype == tl.bfloat16:
        low = tl.inline_asm_elementwise(_LOW, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(_HIGH, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        low, high = pairs.to(tl.int8).to(first.dtype), (pairs >> 8).to(first.dtype)
    return add_product(second, high, add_product(first, low, sums, SWAPPED), SWAPPED)


@triton.jit
def scaled(sums, at, column, width, SCALED: tl.constexpr, SWAPPED: tl.constexpr):
    """Return sums, swapped ones or not, [rows, columns]; those over integers are multiplied by column."""
    if SWAPPED:
        sums = tl.trans(sums)
    if SCALED:
        sums *= tl.load(at + column, mask=column < width, other=0.0)[None, :]
    return sums


@triton.jit
def load_squares(squares_at, tiles, row, rows, TILES: tl.constexpr):
    """Load the sums of squares of each row by tile, if there are any."""
    squares = row
    if TILES > 0:
        tile = tl.arange(0, TILES)
        inside = (tile[:, None] < tiles) & (row[None, :] < rows)
        squares = tl.load(squares_at + tile[:, None] * rows + row[None, :], mask=inside, other=0.0)
    return squares


@triton.jit
def normed(sums, squares, depth, epsilon, NORM: tl.constexpr):
    """Multiply the sums with 1 / sqrt(mean(x^2) + epsilon) of each row."""
    if NORM > 0:
        sums *= (1.0 / tl.sqrt(tl.sum(squares, 0) / depth + epsilon))[:, None]
    return sums
