"""How products of few rows are divided among programs: all of x is read, by about as many programs as a GPU runs."""

from itertools import product

import pytest

from upweight.models.kernels.tiles import gated_tile_of, most_rows, tile_of

PROCESSORS = 132
SHARED_MEMORY = 227 * 1024
# inputs, outputs of each layer: query, key and value; one layer; the first half of two adapters
LAYERS = [
    (1536, [1536, 256, 256]),
    (3584, [3584, 512, 512]),
    (576, [576, 192, 192]),
    (1536, [1536]),
    (8960, [1536]),
    (3584, [3584]),
    (18944, [3584]),
    (1536, [16, 16]),
]


def test_small_products_take_more_rows():
    assert most_rows(1536, 1536) == 512
    assert 64 < most_rows(8960, 1536) < 256
    assert most_rows(18944, 3584) == 64


@pytest.mark.parametrize(("count", "layers"), product([1, 16, 17, 48, 64, 128, 300], LAYERS))
def test_programs_read_all_of_x_and_fit_into_a_processor(count: int, layers: tuple[int, list[int]]):
    depth, widths = layers
    tile = tile_of(count, depth, widths, PROCESSORS)
    assert tile.depth % tile.block == 0
    parts = -(-depth // tile.depth)
    assert parts * tile.depth >= depth > (parts - 1) * tile.depth
    assert 2 * tile.block * (tile.rows + tile.columns) * tile.stages <= SHARED_MEMORY
    programs = parts * -(-count // tile.rows) * sum(-(-width // tile.columns) for width in widths)
    assert programs <= max(2.5 * PROCESSORS, -(-count // tile.rows) * sum(-(-width // 64) for width in widths))


@pytest.mark.parametrize("normed_layers", [LAYERS[0], LAYERS[1]])
@pytest.mark.parametrize("count", [8, 32, 64, 128])
def test_siblings_fill_the_gpu(normed_layers: tuple[int, list[int]], count: int):
    """One program for each tile of columns would leave half of a GPU idle, and take twice as long."""
    depth, widths = normed_layers
    tile = tile_of(count, depth, widths, PROCESSORS)
    tiles = -(-count // tile.rows) * sum(-(-width // tile.columns) for width in widths)
    assert tiles * -(-depth // tile.depth) >= 0.9 * PROCESSORS


@pytest.mark.parametrize(("width", "adapted"), product([1536, 8960, 18944], [False, True]))
def test_a_gated_product_of_few_rows_has_few_rows_in_a_tile(width: int, adapted: bool):
    tiles = [gated_tile_of(count, width, adapted=adapted) for count in (1, 16, 17, 64, 65)]
    assert [tile.rows for tile in tiles] == [16, 16, 64, 64, 64]
    assert all(2 * tile.block * (tile.rows + 2 * tile.columns) * tile.stages <= SHARED_MEMORY for tile in tiles)
