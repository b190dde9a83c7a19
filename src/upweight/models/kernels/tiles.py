"""How the products of few rows are divided among programs, and up to how many rows they are faster than torch's.

The numbers were measured on an H200: `python -m bench.gpu_kernels` prints what they are chosen by. Weights are read by
each tile of rows, x by each tile of columns; where tiles are few, programs share one, each with a part of the depth.
"""

from typing import NamedTuple

# Beyond FEW_ROWS the weights would be read again for each further tile of rows. A product of few multiplications is
# bound by its launches instead, so that one launch wins up to _MOST_ROWS.
FEW_ROWS = 64
MIN_GATED_OUTPUTS = 4096  # outputs below which the tiles of a gated product would not fill a GPU
_MOST_ROWS, _MOST_MULTIPLICATIONS = 512, 3_000_000_000
_TILE_ROWS = (16, 32, FEW_ROWS)  # each further size would be compiled for itself
_DEPTH = 128  # of x and of a weight in a step of a program; half of it where a processor is to hold two programs
_WIDE = 3072  # inputs or outputs of one layer beyond which a tile has twice the columns
_WIDE_SIBLINGS, _WIDE_GATED = 4096, 16_384  # outputs of layers that share an input, and of a gate
_SMALL, _UNSPLIT = 1_000_000, 1024  # weights of a layer in all, and inputs that one program reads
_MOST_PARTS = 8
_STAGES_OF_INT8 = 2  # more of them, since a stage of weights in 8 bits has half the bytes; not measured


class Tile(NamedTuple):
    """The rows and columns that a program computes, the columns of x of a step and in all, and stages of its loads."""

    rows: int
    columns: int
    block: int
    depth: int
    stages: int


class GatedTile(NamedTuple):
    """The same for a gated product, whose programs read all columns of x."""

    rows: int
    columns: int
    block: int
    stages: int


def most_rows(depth: int, width: int) -> int:
    """Return up to how many rows a layer of this width is faster here than torch's products."""
    return max(FEW_ROWS, min(_MOST_ROWS, _MOST_MULTIPLICATIONS // (depth * width)))


def tile_of(count: int, depth: int, widths: list[int], processors: int, *, int8: bool = False) -> Tile:
    """Return the tile for so many rows of x and for layers of these widths, which share it."""
    tile = _tile_of(count, depth, widths, processors)
    return tile._replace(stages=tile.stages + _STAGES_OF_INT8) if int8 else tile


def _tile_of(count: int, depth: int, widths: list[int], processors: int) -> Tile:
    """Return the tile for weights in half precision."""
    rows, width = _tile_rows(count), sum(widths)
    below = _ceil_div(count, rows)
    if depth * width <= _SMALL and below == 1:  # read in a few microseconds, of which merging parts would be one
        if depth <= _UNSPLIT:
            return Tile(_TILE_ROWS[0], 32, _DEPTH // 2, _whole_blocks(depth, _DEPTH // 2), 5)
        return Tile(rows, 16, _DEPTH, _whole_blocks(_ceil_div(depth, 2), _DEPTH), 5)
    if len(widths) > 1:  # whose x is normed by each of its tiles of columns
        wide = min(widths) >= 2 * FEW_ROWS and (width > _WIDE_SIBLINGS or below > 1)
        columns, block = 128 if wide else 32, _DEPTH // 2
        most_programs = 1.7 * processors if below == 1 else 1.1 * processors
    else:
        fills_gpu = below * _ceil_div(width, 32) > processors
        columns = 64 if max(width, depth) > _WIDE or fills_gpu else 32
        most_programs = 2 * processors if rows < FEW_ROWS else processors
        block = _DEPTH if below * _ceil_div(width, columns) <= processors else _DEPTH // 2
    programs = below * sum(_ceil_div(one, columns) for one in widths)
    parts = min(max(1, int(most_programs / programs)), _MOST_PARTS)
    return Tile(rows, columns, block, _whole_blocks(_ceil_div(depth, parts), block), 4)


def gated_tile_of(count: int, width: int, *, adapted: bool, int8: bool = False) -> GatedTile:
    """Return the tile of a gated product for so many rows of x, with or without adapters."""
    rows = _TILE_ROWS[0] if count <= _TILE_ROWS[0] else FEW_ROWS  # 32 rows would read x too often
    stages = (3 if width > _WIDE_GATED else 4) + (_STAGES_OF_INT8 if int8 else 0)
    if width < MIN_GATED_OUTPUTS:
        columns = 16
    elif adapted:
        columns = 64
    elif rows < FEW_ROWS:
        columns = 32
    else:
        columns = 64 if width > _WIDE_GATED else 128
    return GatedTile(rows, columns, _DEPTH // 2, stages)


def _tile_rows(count: int) -> int:
    return next((rows for rows in _TILE_ROWS if rows >= count), FEW_ROWS)


def _whole_blocks(depth: int, block: int) -> int:
    return _ceil_div(depth, block) * block


def _ceil_div(of: int, by: int) -> int:
    return -(-of // by)
