"""How products of few rows are divided among programs: all of x is read, by about as many programs as a GPU runs."""

from itertools import product

import pytest

from upweight.models.kernels.tiles import gated_tile_of, most_gated_rows, most_rows, tile_of

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


@pytest.mark.parametrize(("rank", "int8"), [(0, False), (16, False), (64, False), (0, True), (64, True)])
@pytest.mark.parametrize(("count", "layers"), list(product([1, 16, 17, 48, 64, 128, 300], LAYERS)))
def test_programs_read_all_of_x_and_fit_into_a_processor(
    count: int, layers: tuple[int, list[int]], rank: int, int8: bool
):
    depth, widths = layers
    depth, inputs = (depth // 2, 2) if int8 else (depth, 1)
    tile = tile_of(count, depth, widths, PROCESSORS, rank=rank, int8=int8)
    assert tile.depth % tile.block == 0
    parts = -(-depth // tile.depth)
    assert parts * tile.depth >= depth > (parts - 1) * tile.depth
    assert 2 * tile.block * ((tile.rows + rank) * inputs + tile.columns) * tile.stages <= SHARED_MEMORY
    programs = parts * -(-count // tile.rows) * sum(-(-width // tile.columns) for width in widths)
    assert programs <= max(3 * PROCESSORS, -(-count // tile.rows) * sum(-(-width // 64) for width in widths))


@pytest.mark.parametrize("layers", [LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[4], LAYERS[5], LAYERS[6], LAYERS[7]])
@pytest.mark.parametrize("count", [8, 32, 64, 128, 512])
def test_programs_fill_half_of_the_gpu_and_run_at_once(layers: tuple[int, list[int]], count: int):
    depth, widths = layers
    tile = tile_of(count, depth, widths, PROCESSORS)
    tiles = -(-count // tile.rows) * sum(-(-width // tile.columns) for width in widths)
    small = depth * sum(widths) < 1_000_000
    assert small or tiles * -(-depth // tile.depth) >= 0.5 * PROCESSORS
    assert tiles * -(-depth // tile.depth) <= PROCESSORS or tile.columns == 128 or tile.depth >= depth


@pytest.mark.parametrize(("rank", "int8"), [(0, False), (16, False), (64, False), (0, True), (64, True)])
@pytest.mark.parametrize("width", [1536, 8960, 18944])
def test_a_gated_product_of_few_rows_has_few_rows_in_a_tile(width: int, rank: int, int8: bool):
    tiles = [gated_tile_of(count, width, rank=rank, int8=int8) for count in (1, 16, 17, 64, 65)]
    assert [tile.rows for tile in tiles] == [16, 16, 64 if width < 4096 else 32, 64, 64]
    inputs = 2 if int8 else 1
    for tile in tiles:
        stage = 2 * tile.block * ((tile.rows + 2 * rank) * inputs + 2 * tile.columns)
        assert stage * tile.stages <= SHARED_MEMORY


def test_a_gated_product_that_fits_a_gpu_takes_more_rows():
    assert [most_gated_rows(width) for width in (1536, 8960, 18944)] == [64, 128, 64]
