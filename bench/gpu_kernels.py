"""The sampler's kernels on a GPU, one JSON line a case: `python -m bench.gpu_kernels [CASE ...]`.

Linear layers with and without a LoRA of rank 16: `ours_us` by our kernels, `apart_us` by torch's products, and for few
rows `int8_us` by our kernels that read weights in 8 bits. Attention of
one decoding step: ours alone. Microseconds of a call inside a CUDA graph over several copies of the tensors, so that
none is found in the cache.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_share import SHAPE_7B
from bench.gpu_step import SHAPE
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.models.kernels import gated
from upweight.models.kernels import linear as kernel
from upweight.models.kernels.int8_weights import quantised
from upweight.models.kernels.tiles import FEW_INT8_ROWS, FEW_ROWS
from upweight.sampler.kernels.paged_attention import paged_step
from upweight.sampler.pages import PAGE

SHAPES = {"1.5b": SHAPE, "7b": SHAPE_7B}
ROWS = (16, 32, 64, 128, 256, 512)
RANK, SCALING = 16, 2.0
CACHE = 400_000_000  # bytes that no cache holds
ATTENTION = [(64, 256, 128), (256, 256, 128), (32, 2048, 512)]  # slots, tokens of a prompt, of a completion
GROUP, HEADS, KEY_HEADS = 16, SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
HEAD = SHAPE["hidden_size"] // HEADS


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


class Layers:
    """Layers that read one input, with their adapters if they have any."""

    def __init__(self, depth: int, widths: list[int], adapted: bool, gated: bool) -> None:
        self.weights = [drawn(width, depth) for width in widths]
        self.downs = [drawn(RANK, depth) for _ in widths] if adapted else []
        self.ups = [drawn(width, RANK) for width in widths] if adapted else []
        self.scalings = [SCALING] * len(self.downs)
        self.gated = gated
        self.copies = [quantised(weight) for weight in self.weights]

    def ours(self, x_ND: Tensor) -> Tensor:
        """By our kernels, whether they pay for these rows or not."""
        weights, downs, ups, scalings = self.weights, self.downs, self.ups, self.scalings
        if not self.gated:
            return kernel.few_rows_linears(x_ND, weights, [], downs, ups, scalings)
        if len(x_ND) <= FEW_ROWS or not downs:
            return gated.few_rows_gated(x_ND, weights, downs, ups, scalings)
        narrow_NR = kernel.few_rows_linears(x_ND, downs, [], [], [], [])
        return gated.gated_terms(F.linear(x_ND, weights[0]), F.linear(x_ND, weights[1]), narrow_NR, ups, scalings)

    def in_int8(self, x_ND: Tensor) -> Tensor:
        """By our kernels for few rows, from weights in 8 bits."""
        pairs, scales = (list(part) for part in zip(*self.copies, strict=True))
        if self.gated:
            return gated.gated_linears(x_ND, pairs, self.downs, self.ups, self.scalings, scales=scales)
        return kernel.linears(x_ND, pairs, [], self.downs, self.ups, self.scalings, scales=scales).out_NF

    def apart(self, x_ND: Tensor) -> list[Tensor]:
        """By torch's products."""
        out = [F.linear(x_ND, weight) for weight in self.weights]
        for place, (down, up) in enumerate(zip(self.downs, self.ups, strict=True)):
            out[place] = torch.addmm(out[place], F.linear(x_ND, down), up.t(), alpha=SCALING)
        return [_gate(*out)] if self.gated else out


@torch.compile(dynamic=True)
def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def microseconds(calls: list[Callable[[], Any]], repeats: int = 20) -> float:
    """Mean time of the calls, recorded one after the other and replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / repeats / len(calls) * 1e3, 1)


def layers(shape: str) -> Iterator[dict[str, Any]]:
    """Each kind of layer of a shape by rows."""
    sizes = SHAPES[shape]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    kinds = {
        "query_key_value": (hidden, [hidden, keys, keys]),
        "gate_up": (hidden, [inner, inner]),
        "out": (hidden, [hidden]),
        "down": (inner, [hidden]),
    }
    for kind, (depth, widths) in kinds.items():
        for adapted in (True, False) if len(widths) > 1 else (True,):  # one plain layer is torch's in any case
            copies = max(3, CACHE // (2 * depth * sum(widths)))
            all_layers = [Layers(depth, widths, adapted, kind == "gate_up") for _ in range(copies)]
            for rows in ROWS:
                x_ND = drawn(rows, depth)
                ours = microseconds([partial(one.ours, x_ND) for one in all_layers])
                apart = microseconds([partial(one.apart, x_ND) for one in all_layers])
                line = {"name": f"{shape}_{kind}", "rows": rows, "rank": RANK if adapted else 0, "ours_us": ours}
                if rows <= FEW_INT8_ROWS:
                    line["int8_us"] = microseconds([partial(one.in_int8, x_ND) for one in all_layers])
                yield line | {"apart_us": apart, "ratio": round(apart / ours, 2)}


def tables(slots: int, shared: int, more: int) -> tuple[Tensor, int]:
    """The pages of each slot, the first ones shared by its group, and the number of all pages."""
    slot_B1 = torch.arange(slots)[:, None]
    before_BT = 1 + slot_B1 // GROUP * shared + torch.arange(shared)
    after_BT = 1 + slots // GROUP * shared + slot_B1 * more + torch.arange(more)
    return torch.cat([before_BT, after_BT], 1).int().cuda(), 1 + slots // GROUP * shared + slots * more


def attention(_case: str) -> Iterator[dict[str, Any]]:
    """A decoding step's attention, completions in groups of 16."""
    for slots, prompt, new in ATTENTION:
        table_BT, pages = tables(slots, -(-prompt // PAGE), -(-new // PAGE))
        length_B = torch.full((slots,), prompt + new - 1, device="cuda")
        calls: list[Callable[[], Any]] = []
        for _ in range(8):
            pools = drawn(pages, KEY_HEADS, PAGE, HEAD), drawn(pages, KEY_HEADS, PAGE, HEAD)
            newest = [drawn(slots, count, 1, HEAD) for count in (HEADS, KEY_HEADS, KEY_HEADS)]
            calls.append(partial(paged_step, *newest, pools, (table_BT, length_B), AttentionParams(Rule(), HEAD**-0.5)))
        yield {"name": "attention", "slots": slots, "prompt": prompt, "new": new, "ours_us": microseconds(calls)}


CASES: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "1.5b": layers,
    "7b": layers,
    "attention": attention,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    for case in parser.parse_args().cases or CASES:
        if case not in CASES:
            parser.error(f"no case '{case}'; there are {', '.join(CASES)}")
        for line in CASES[case](case):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
