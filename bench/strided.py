"""Blocks of documents sampled over a cache, against one full forward for each token, in one process."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.cases import SHAPE, VOCABULARY
from upweight.engine import Engine
from upweight.methods import EBFT
from upweight.rollout.ebft import StridedBlocks, anchors
from upweight.sampler.in_process import InProcess
from upweight.types import Group, Sampling

NAME = "ebft_strided_generation"
LENGTH = 512  # tokens of a document


@torch.no_grad()
def full_forwards(model: Any, ids: list[int], starts: list[int], method: EBFT) -> Any:
    """Tokens of all blocks, step by step: each step forwards the document and all that was sampled, without a cache.

    One row for each sample of the document, in which step s of block b lies at `length + s * blocks + b`.
    """
    length, blocks, count = len(ids), len(starts), method.n_samples_per_prompt
    anchor = torch.tensor(starts)
    rows = torch.tensor(ids).expand(count, -1)
    position = torch.arange(length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for step in range(method.generate_max_len):
        total = length + step * blocks
        seen = torch.zeros(total, total, dtype=torch.bool)
        seen[:length, :length] = causal
        block = torch.arange(step * blocks) % blocks
        order = torch.arange(step * blocks)
        seen[length:, :length] = torch.arange(length) < anchor[block][:, None]
        seen[length:, length:] = (block[:, None] == block) & (order[:, None] >= order)
        states = model(
            input_ids=rows, attention_mask=seen[None, None].expand(count, 1, -1, -1), position_ids=position[None],
            use_cache=False, logits_to_keep=anchor - 1 if step == 0 else torch.arange(total - blocks, total),
        )  # fmt: skip
        p = (states.logits.float() / method.temperature).softmax(-1)
        rows = torch.cat([rows, torch.multinomial(p.flatten(0, 1), 1).view(count, blocks)], 1)
        position = torch.cat([position, anchor + step])
    return rows[:, length:].view(count, -1, blocks)


def measure(threads: int, repeats: int) -> dict[str, Any]:
    """Medians of both sides, in turn, after one of each to warm up."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=1, bos_token_id=None, **SHAPE)
    plain = Qwen2ForCausalLM(config).eval()
    model = Qwen2ForCausalLM(config).eval()
    model.load_state_dict(plain.state_dict())
    method = EBFT(mode="strided", stride=8, context_length=8, generate_max_len=8, n_samples_per_prompt=4)
    ids = np.random.default_rng(0).integers(2, VOCABULARY, LENGTH).tolist()
    row = {"input_ids": ids, "loss_mask": [False] + [True] * (LENGTH - 1), "prompt_length": 1}
    engine = Engine(model)
    completion_source = StridedBlocks(model, method, InProcess(model, engine=engine, end_ids=()), str)
    starts, count, size = anchors(row, method), method.n_samples_per_prompt, method.generate_max_len

    def ours() -> None:
        completion_source([Group(0, row, ids)], count, Sampling(size, temperature=method.temperature, seed=0), None)

    def peer() -> None:
        full_forwards(plain, ids, starts, method)

    seconds = [[_timed(side) for side in (ours, peer)] for _ in range(repeats + 1)][1:]
    (wall, cpu), (peer_wall, peer_cpu) = np.median(seconds, 0)
    return {
        "name": NAME,
        "ours_s": round(wall, 3),
        "peer_s": round(peer_wall, 3),
        "ratio": round(peer_wall / wall, 2),
        "cpu_ratio": round(peer_cpu / cpu, 2),
        "blocks": len(starts) * count,
        "tokens": len(starts) * count * size,
        "peer": "one full forward for each token",
        "threads": threads,
        "repeats": repeats,
    }


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
