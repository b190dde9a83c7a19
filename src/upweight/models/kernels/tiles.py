"""How the products of few rows are divided among programs, and up to how many rows they are faster than torch's.

The numbers were measured on an H200: `python -m bench.gpu_kernels` prints what they are chosen by. Weights are read by
each tile of rows, x by each tile of columns; where tiles are few, programs share one, each with a part of the depth.
"""

from typing import NamedTuple

# Beyond FEW_ROWS the weights would be read again for each further tile of rows. A product of few multiplications is
# bound by its launches instead, so that one launch wins up to _MOST_ROWS.
FEW_ROWS = 64
FEW_INT8_ROWS = 32  # beyond, converting integers takes longer than reading twice their bytes
MIN_GATED_OUTPUTS = 4096  # outputs below which the tiles of a gated product would not fill a GPU
_MOST_ROWS, _MOST_MULTIPLICATIONS = 512, 3_000_000_000
_TILE_ROWS = (16, 32, FEW_ROWS)  # each further size would be compiled for itself
_DEPTH = 128  # of x and of a weight in a step of a program; half of it where a processor is to hold two programs
_WIDE_GATED = 16_384  # outputs of a gate beyond which a tile has half the columns
_SMALL, _UNSPLIT_SMALL, _UNSPLIT = 1_000_000, 1024, 2048  # weights of a layer in all, and inputs that one program reads
_MOST_PARTS, _MOST_STAGES = 8, 6
_USUAL_RANK = 16
_SHARED_MEMORY = 220 * 1024  # bytes of a processor that the stages of a program may take


class Tile(NamedTuple):
    """The rows and columns that a program computes, the columns of x of a step and in all, and how it runs."""

    rows: int
    columns: int
    block: int
    depth: int
    stages: int
    warps: int = 4


class GatedTile(NamedTuple):
    """The same for a gated product, whose programs read all columns of x."""

    rows: int
    columns: int
    block: int
    stages: int
    warps: int = 4


def most_rows(depth: int, width: int) -> int:
    """Return up to how many rows a layer of this width is faster here than torch's products."""
    return max(FEW_ROWS, min(_MOST_ROWS, _MOST_MULTIPLICATIONS // (depth * width)))


def most_gated_rows(width: int) -> int:
    """Return up to how many rows a gated product without adapters is faster here than torch's products."""
    return 2 * FEW_ROWS if MIN_GATED_OUTPUTS <= width <= _WIDE_GATED else FEW_ROWS


def tile_of(count: int, depth: int, widths: list[int], processors: int, *, rank: int = 0, int8: bool = False) -> Tile:
    """Return the tile for so many rows of x and for layers of these widths, which share it.

    `depth`: inputs, or pairs of them where the weights are in 8 bits; `rank`: of adapters.
    """
    rows, width = _tile_rows(count), sum(widths)
    below = _ceil_div(count, rows)
    if depth * width <= _SMALL and below == 1:  # read in a few microseconds, of which merging parts would be one
        if depth <= _UNSPLIT_SMALL:
            return Tile(_TILE_ROWS[0], 32, _DEPTH // 2, _whole_blocks(depth, _DEPTH // 2), 5)
        return Tile(rows, 16, _DEPTH, _whole_blocks(_ceil_div(depth, 2), _DEPTH), 5)
    if int8:
        parts = max(1, min(3 * processors // (below * _tiles(widths, 64)), _MOST_PARTS))
        return Tile(rows, 64, _DEPTH // 2, _whole_blocks(_ceil_div(depth, parts), _DEPTH // 2), 4)
    columns = 64
    unsplit = (len(widths) > 1 or depth <= _UNSPLIT) and not (rank and rows == _TILE_ROWS[0])
    if unsplit:  # merging parts would take longer than reading more
        columns = next((few for few in (16, 32, 64) if below * _tiles(widths, few) <= processors), 128)
    programs = below * _tiles(widths, columns)
    parts = 1 if unsplit and 2 * programs > processors else max(1, min(processors // programs, _MOST_PARTS))
    stages = _SHARED_MEMORY // (2 * _DEPTH * (rows + rank + columns))
    warps = 8 if rows * columns > FEW_ROWS * FEW_ROWS else 4
    return Tile(rows, columns, _DEPTH, _whole_blocks(_ceil_div(depth, parts), _DEPTH), min(stages, _MOST_STAGES), warps)


def gated_tile_of(count: int, width: int, *, rank: int = 0, int8: bool = False) -> GatedTile:
    """Return the tile of a gated product for so many rows of x, with adapters of this rank or without."""
    rows, block = _tile_rows(count), _DEPTH // 2
    fewest = rows == _TILE_ROWS[0]
    if width < MIN_GATED_OUTPUTS:
        return GatedTile(rows if fewest else FEW_ROWS, 16, block, 4)  # 32 rows would read x too often
    if int8:
        return GatedTile(rows, 32, block, 4) if fewest else GatedTile(rows, 64, block, 3)
    if rank:
        return GatedTile(rows, 64, block, 3 if rank > _USUAL_RANK else 4)
    if fewest:
        return GatedTile(rows, 32, _DEPTH, 3)
    if width > _WIDE_GATED or count > FEW_ROWS:
        return GatedTile(rows, 64, block, 3)
    return GatedTile(rows, 128, block, 5)


def _tiles(widths: list[int], columns: int) -> int:
    return sum(_ceil_div(width, columns) for width in widths)


def _tile_rows(count: int) -> int:
    return next((rows for rows in _TILE_ROWS if rows >= count), FEW_ROWS)


def _whole_blocks(depth: int, block: int) -> int:
    return _ceil_div(depth, block) * block


def _ceil_div(of: int, by: int) -> int:
    return -(-of // by)
