"""What the tiles of the sampler's linear layers are chosen by: `python -m bench.gpu_tiles [SHAPE ...]`.

For each kind of layer, number of rows and width of its weights many tiles are tried, each in a CUDA graph over copies
that no cache holds. A line has the microseconds of today's tile, of torch's products, of reading the weights once, and
of the fastest tiles with their numbers: rows, columns, block, depth, stages, warps, swapped. For attention these are
keys of a block, warps, stages, parts of a slot's keys and the fewest keys of a part. Kernels are compiled by processes
beforehand. `--rows` and `--kinds` choose among the cases.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from bench.gpu_kernels import SHAPES, drawn, microseconds, tables
from bench.gpu_tail import SHAPE_135M
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.models.kernels import gated, launch
from upweight.models.kernels import linear as kernel
from upweight.models.kernels.int8_weights import quantised
from upweight.models.kernels.tiles import GatedTile, Tile, gated_tile_of, tile_of
from upweight.models.modules import context_value
from upweight.sampler.kernels import paged_attention
from upweight.sampler.pages import PAGE

ALL_SHAPES = SHAPES | {"135m": SHAPE_135M}
ROWS = (16, 32, 64, 128)
KINDS = ("query_key_value", "out", "gate_up", "down")
MOST_IN_INT8 = 128  # rows
PROCESSORS, SHARED_MEMORY = 132, 227 * 1024  # of an H200, and bytes of one processor
BANDWIDTH = 4.8e12
CACHE = 150_000_000  # bytes that no cache of it holds
EPSILON, NORM_TILES = 1e-6, 40
REPEATS = 5
ATTENTION = [(16, 1700), (32, 1500), (64, 1300), (128, 900), (256, 500), (512, 200)]  # slots, tokens of a completion
PROMPT = 256  # tokens, of each group of 16


class Layer(NamedTuple):
    """A kind of layer by its sizes, and the rank of its adapter, if it has one."""

    shape: str
    kind: str
    depth: int
    widths: list[int]
    rank: int

    @property
    def gated(self) -> bool:
        return self.kind == "gate_up"


def layers(shapes: list[str], kinds: list[str], rank: int) -> Iterator[Layer]:
    for shape in shapes:
        sizes = ALL_SHAPES[shape]
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        keys = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
        named = {
            "query_key_value": (hidden, [hidden, keys, keys]), "out": (hidden, [hidden]),
            "gate_up": (hidden, [inner, inner]), "down": (inner, [hidden]),
        }  # fmt: skip
        yield from (Layer(shape, kind, *named[kind], rank) for kind in kinds)


def tile_rows(rows: int, *, int8: bool) -> tuple[int, ...]:
    if rows <= 32:
        return (16,) if rows <= 16 else (16, 32)
    return (*((16, 32) if int8 else ()), 64, *((128,) if rows > 64 else ()))


def tiles(layer: Layer, rows: int, *, int8: bool) -> list[tuple[Any, bool]]:
    """The tiles that are tried, with the weight as the right factor and as the left one (swapped).

    They have as many stages as let one to three programs share a processor.
    """
    chosen = set()
    weights, inputs = 2 if layer.gated else 1, 2 if int8 else 1
    outputs, pairs = layer.widths[:1] if layer.gated else layer.widths, layer.depth // inputs
    heights = tile_rows(rows, int8=int8)
    for height, columns, block, each in itertools.product(heights, (16, 32, 64, 128), (64, 128), (1, 2, 3)):
        bytes_of_stage = 2 * block * ((height + weights * layer.rank) * inputs + weights * columns)
        stages = min(SHARED_MEMORY // each // bytes_of_stage, 6)
        programs = -(-rows // height) * sum(-(-width // columns) for width in outputs)
        if stages < 2 or programs > 6 * PROCESSORS or programs * 8 < PROCESSORS // 2:
            continue
        depth = triton.cdiv(triton.cdiv(pairs, max(1, min(each * PROCESSORS // programs, 8))), block) * block
        large = height * columns * weights >= 64 * 64
        for warps in (2, 4, 8) if int8 and large else (2, 4) if int8 else (4, 8) if large else (4,):
            tile = (
                GatedTile(height, columns, block, stages, warps) if layer.gated
                else Tile(height, columns, block, depth, stages, warps)
            )  # fmt: skip
            chosen |= {(tile, swapped) for swapped in (False, True) if not swapped or (columns >= 64 and warps > 2)}
    return sorted(chosen)


class Copies:
    """Copies of a layer's weights, which no cache holds."""

    def __init__(self, layer: Layer, *, int8: bool, count: int = 0) -> None:
        self.layer, self.int8 = layer, int8
        elements = layer.depth * sum(layer.widths)
        self.bytes = elements * (1 if int8 else 2)
        self.weights, self.scales = [], []
        for _ in range(count or max(2, CACHE // self.bytes)):
            weights = [drawn(width, layer.depth) for width in layer.widths]
            copies = [quantised(weight) for weight in weights] if int8 else []
            self.weights.append([copy.pairs_FP for copy in copies] or weights)
            self.scales.append([copy.scale_F for copy in copies])
        self.downs = [drawn(layer.rank, layer.depth) for _ in layer.widths if layer.rank]
        self.ups = [drawn(width, layer.rank) for width in layer.widths if layer.rank]
        self.scalings = [2.0] * len(self.ups)
        self.biases = [drawn(width) for width in layer.widths] if layer.kind == "query_key_value" else []

    def call(self, number: int, x_ND: Tensor, norm: kernel.InputNorm, residual_NF: Tensor) -> None:
        weights, scales = self.weights[number], self.scales[number]
        adapters = self.downs, self.ups, self.scalings
        if self.layer.gated:
            gated.gated_linears(x_ND, weights, *adapters, norm, scales)
        elif self.biases:
            kernel.linears(x_ND, weights, self.biases, *adapters, norm=norm, scales=scales)
        else:
            one = norm_weight(self.layer.widths[0])
            kernel.linears(x_ND, weights, [], *adapters, residual_NF=residual_NF, next_weight=one, scales=scales)

    def by_torch(self, number: int, x_ND: Tensor, norm: kernel.InputNorm, residual_NF: Tensor) -> None:
        weights = self.weights[number]
        if self.layer.kind in ("out", "down"):
            residual_NF.addmm_(x_ND, weights[0].t())
            return
        x_ND = F.rms_norm(x_ND, x_ND.shape[1:], norm_weight(self.layer.depth), norm.epsilon)
        out = [F.linear(x_ND, weight) for weight in weights]
        if self.layer.gated:
            gated.gated_terms(*out, x_ND, [], [])


def inputs(layer: Layer, rows: int) -> tuple[Tensor, kernel.InputNorm, Tensor]:
    squares_TN = torch.full((NORM_TILES, rows), layer.depth / NORM_TILES, device="cuda")
    return drawn(rows, layer.depth), kernel.InputNorm(EPSILON, squares_TN), drawn(rows, layer.widths[0])


@cache
def norm_weight(width: int) -> Tensor:
    return torch.ones(width, device="cuda", dtype=torch.bfloat16)


@contextmanager
def patched(layer: Layer, tile: Any, swapped: bool) -> Iterator[None]:
    module, name = (gated, "gated_tile_of") if layer.gated else (kernel, "tile_of")
    with (
        patch.object(module, name, lambda *_args, **_kwargs: tile),
        patch.object(module, "is_swapped", lambda *_: swapped),
    ):
        yield


def compile_all(work: list[tuple[Layer, int, bool, Any, bool]]) -> None:
    """Compile the kernels of some cases, so that they lie on disk."""
    copies: dict[tuple[str, bool], Copies] = {}
    for layer, rows, int8, tile, swapped in work:
        if (layer.kind, int8) not in copies:
            copies[layer.kind, int8] = Copies(layer, int8=int8, count=1)
        with suppress(Exception), context_value(launch._only_compiling, True), patched(layer, tile, swapped):
            copies[layer.kind, int8].call(0, *inputs(layer, rows))


def measured(copies: Copies, rows: int) -> dict[str, Any]:
    """The line of one kind of layer for so many rows."""
    layer = copies.layer
    x_ND, norm, residual_NF = inputs(layer, rows)
    calls = [partial(copies.call, number, x_ND, norm, residual_NF) for number in range(len(copies.weights))]
    today: Any = (
        gated_tile_of(rows, layer.widths[0], rank=layer.rank, int8=copies.int8) if layer.gated
        else tile_of(
            rows, layer.depth // (1 + copies.int8), layer.widths, PROCESSORS, rank=layer.rank, int8=copies.int8
        )
    )  # fmt: skip
    line: dict[str, Any] = {"name": f"{layer.shape}_{layer.kind}", "rows": rows, "rank": layer.rank}
    line["int8"] = copies.int8
    line["reading_us"] = round(copies.bytes / BANDWIDTH * 1e6, 1)
    line["today_us"], line["today"] = microseconds(calls, REPEATS), list(today)
    if not copies.int8:
        apart = [partial(copies.by_torch, number, x_ND, norm, residual_NF) for number in range(len(calls))]
        line["torch_us"] = microseconds(apart, REPEATS)
    times = []
    for tile, swapped in tiles(layer, rows, int8=copies.int8):
        with patched(layer, tile, swapped), suppress(Exception):
            times.append((microseconds(calls, REPEATS), [*tile, swapped]))
    return line | {"best": sorted(times)[:5], "tried": len(times)}


def attention_inputs(shape: str, slots: int, new: int, copies: int) -> tuple[list[Any], float]:
    """Calls of a decoding step's attention, and the microseconds that reading its keys and values once takes."""
    heads, key_heads = ALL_SHAPES[shape]["num_attention_heads"], ALL_SHAPES[shape]["num_key_value_heads"]
    width = ALL_SHAPES[shape]["hidden_size"] // heads
    table_BT, pages = tables(slots, -(-PROMPT // PAGE), -(-new // PAGE))
    length_B = torch.full((slots,), PROMPT + new - 1, device="cuda")
    params = AttentionParams(Rule(), width**-0.5)
    calls: list[Any] = []
    for _ in range(copies):
        pools = drawn(pages, key_heads, PAGE, width), drawn(pages, key_heads, PAGE, width)
        newest = [drawn(slots, count, 1, width) for count in (heads, key_heads, key_heads)]
        calls.append(partial(paged_attention.paged_step, *newest, pools, (table_BT, length_B), params))
    return calls, 4 * pages * PAGE * key_heads * width / BANDWIDTH * 1e6


def attention_blocks(slots: int, key_heads: int) -> list[tuple[int, int, int, int, int]]:
    pairs = slots * key_heads
    parts = sorted({max(1, min(programs // pairs, 32)) for programs in (1, 132, 264, 528, 1056, 2112)})
    return [
        (columns, warps, stages, part, least)
        for columns, warps in ((32, 1), (32, 2), (64, 2), (64, 4))
        for stages in (2, 3, 4)
        for part in parts
        for least in (128, 512)
    ]


def attention(shape: str) -> Iterator[dict[str, Any]]:
    """A line for each number of slots."""
    for slots, new in ATTENTION:
        calls, reading = attention_inputs(shape, slots, new, 6)
        line: dict[str, Any] = {
            "name": f"{shape}_attention",
            "slots": slots,
            "new": new,
            "reading_us": round(reading, 1),
        }
        line["today_us"], times = microseconds(calls, REPEATS), []
        for blocks in attention_blocks(slots, ALL_SHAPES[shape]["num_key_value_heads"]):
            with patch.object(paged_attention, "_blocks", lambda *_, blocks=blocks: blocks), suppress(Exception):
                times.append((microseconds(calls, REPEATS), list(blocks)))
        yield line | {"best": sorted(times)[:5], "tried": len(times)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_tiles", description=__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(ALL_SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "attention"], default=[*KINDS, "attention"])
    parser.add_argument("--rank", type=int, default=0, help="of an adapter")
    parser.add_argument("--weights", choices=["bfloat16", "int8"], nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--seconds", type=float, default=1e9, help="no case begins after so many")
    asked = parser.parse_args()
    began = time.perf_counter()
    chosen = list(
        layers(shapes := asked.shapes or list(ALL_SHAPES), [kind for kind in asked.kinds if kind in KINDS], asked.rank)
    )
    widths_of_weights = [name == "int8" for name in asked.weights]
    kernels: dict[Any, tuple[Layer, int, bool, Any, bool]] = {}
    for layer in chosen:
        for rows in asked.rows:
            for int8 in widths_of_weights if rows <= MOST_IN_INT8 else (False,):
                for tile, swapped in tiles(layer, rows, int8=int8):
                    split = not layer.gated and tile.depth < layer.depth // (1 + int8)
                    rest = (tile[0], tile[1], tile[2], *tile[-2:])
                    kernels.setdefault((layer.kind, int8, rest, split, swapped), (layer, rows, int8, tile, swapped))
    work = list(kernels.values())
    random.Random(0).shuffle(work)
    count = min(16, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(compile_all, [work[number::count] for number in range(count)], chunksize=1)
    print(
        json.dumps({"name": "compiled", "kernels": len(work), "s": round(time.perf_counter() - began, 1)}), flush=True
    )
    for layer in chosen:
        for int8 in widths_of_weights:
            copies = Copies(layer, int8=int8)
            for rows in asked.rows:
                if (int8 and rows > MOST_IN_INT8) or time.perf_counter() - began > asked.seconds:
                    continue
                print(json.dumps(measured(copies, rows)), flush=True)
            del copies
            torch.cuda.empty_cache()
    for shape in shapes if "attention" in asked.kinds else ():
        for line in attention(shape):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
