"""The sampler's kernels on a GPU, one JSON line a case: `python -m bench.gpu_kernels [CASE ...]`.

Linear layers with and without a LoRA of rank 16: `ours_us` by our kernels, `apart_us` by torch's products. Attention of
one decoding step: ours alone. The experts of a layer of Qwen3-30B-A3B for the tokens of a decoding step, against the
compiled forward of transformers (`read_mb`: of the experts that some token chose); and rows of tokens moved to pairs of
token and expert and back, against indexing. Microseconds of a call inside a CUDA graph over several copies of the
tensors, so that none is found in the cache.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.gpu_moe import SHAPE as MIXTURE
from bench.gpu_share import SHAPE_7B
from bench.gpu_step import SHAPE
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.models.kernels import linear as kernel
from upweight.sampler.kernels.paged_attention import paged_step
from upweight.sampler.pages import PAGE

SHAPES = {"1.5b": SHAPE, "7b": SHAPE_7B}
ROWS = (64, 128, 256, 512)
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

    def ours(self, x_ND: Tensor) -> Tensor:
        """By our kernels, whether they pay for these rows or not."""
        weights, downs, ups, scalings = self.weights, self.downs, self.ups, self.scalings
        if not self.gated:
            return kernel.few_rows_linears(x_ND, weights, [], downs, ups, scalings)
        if len(x_ND) <= kernel.FEW_ROWS or not downs:
            return kernel.few_rows_gated(x_ND, weights, downs, ups, scalings)
        narrow_NR = kernel.few_rows_linears(x_ND, downs, [], [], [], [])
        return kernel.gated_terms(F.linear(x_ND, weights[0]), F.linear(x_ND, weights[1]), narrow_NR, ups, scalings)

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


@torch.no_grad()
def experts(_case: str) -> Iterator[dict[str, Any]]:
    """The experts of one layer for few tokens; rows of pairs for many."""
    from upweight.models.kernels.few_experts import few_experts
    from upweight.models.kernels.pair_rows import spread_rows, sum_rows

    number, top_k, hidden = (MIXTURE[name] for name in ("num_experts", "num_experts_per_tok", "hidden_size"))
    config = Qwen3MoeConfig(**MIXTURE)
    with torch.device("cuda"):
        all_layers = [Qwen3MoeExperts(config).bfloat16().requires_grad_(False) for _ in range(2)]
    for weight in (weight for layer in all_layers for weight in layer.parameters()):
        weight.normal_(0, 0.02)
    stock = torch.compile(grouped_mm_experts_forward, dynamic=True)
    for tokens in (8, 64, 256, 512):
        x_ND = drawn(tokens, hidden)
        index_NK = torch.rand(tokens, number, device="cuda").topk(top_k).indices
        weight_NK = torch.rand(tokens, top_k, device="cuda", dtype=torch.bfloat16)
        given = [(x_ND, index_NK, weight_NK, layer.gate_up_proj, layer.down_proj) for layer in all_layers]
        ours = microseconds([partial(few_experts, *one) for one in given])
        apart = microseconds([partial(stock, layer, x_ND, index_NK, weight_NK) for layer in all_layers])
        difference = (few_experts(*given[0]) - stock(all_layers[0], x_ND, index_NK, weight_NK)).float()
        size = sum(weight.nbytes for weight in all_layers[0].parameters()) / number * len(index_NK.unique())
        line = {"name": "experts", "rows": tokens, "ours_us": ours, "apart_us": apart, "ratio": round(apart / ours, 2)}
        relative = difference.norm() / few_experts(*given[0]).float().norm()
        yield line | {"read_mb": round(size / 1e6), "difference": round(float(relative), 4)}
    tokens = 9312
    place_S = torch.randperm(tokens * top_k, device="cuda")
    token_S = place_S.argsort() // top_k
    rows, pairs = [drawn(tokens, hidden) for _ in range(4)], [drawn(tokens * top_k, hidden) for _ in range(4)]
    moved: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], list[Tensor]]] = {
        "spread": (lambda x: spread_rows(x, place_S, top_k), lambda x: x.index_select(0, token_S), rows),
        "sum": (
            lambda x: sum_rows(x, place_S, top_k),
            lambda x: x.index_select(0, place_S).view(tokens, top_k, hidden).sum(1),
            pairs,
        ),
    }
    for name, (by_kernel, by_torch, tensors) in moved.items():
        ours, apart = (microseconds([partial(call, x) for x in tensors]) for call in (by_kernel, by_torch))
        yield {"name": f"pairs_{name}", "rows": tokens, "ours_us": ours, "apart_us": apart}


CASES: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {
    "1.5b": layers,
    "7b": layers,
    "attention": attention,
    "experts": experts,
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
