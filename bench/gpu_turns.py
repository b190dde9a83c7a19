"""Conversations of many turns on a GPU, a JSON line a rollout and one for all: `python -m bench.gpu_turns`.

Episodes begin with a prompt of their group. In each turn all of them sample an answer, whose end is drawn with
probability 1 / mean at each token, and get an observation of a tool. The sampler keeps the keys and values of earlier
turns; for comparison the same conversations are sampled again with all of them forgotten before each turn, so that
every turn reads everything. `tokens` are those of all conversations in the end, shared prompts counted once, and
`prefill_tokens` those that were read before others were drawn. The first rollout, which compiles, is not timed.
`--tiny` tries the command on a CPU, where nothing is kept between turns.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.gpu_step import SHAPE, VOCABULARY
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(*, tiny: bool) -> Any:
    """Random weights in bfloat16 on the GPU; tiny ones in float32 on the CPU."""
    torch.manual_seed(0)
    shape = {**SHAPE, "max_position_embeddings": 32_768, **(SMALL if tiny else {})}
    config = Qwen2Config(vocab_size=512 if tiny else VOCABULARY, **shape)
    if tiny:
        return Qwen2ForCausalLM(config).requires_grad_(False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.requires_grad_(False)


def rollout(sampler: InProcess, asked: argparse.Namespace, seed: int, *, keep: bool) -> dict[str, Any]:
    """Sample all turns of all episodes; return seconds and tokens."""
    numbers = np.random.default_rng(seed)

    def text(length: int) -> list[int]:
        return numbers.integers(0, 500, length).tolist()

    groups = [text(asked.prompt) for _ in range(asked.groups)]
    histories = [[*prompt] for prompt in groups for _ in range(asked.members)]
    before, began = sampler.prefilled_tokens, time.perf_counter()
    for turn in range(asked.turns):
        if turn == 0 or not keep:
            sampler.sync(seed)  # the weights count as changed, and what was read is forgotten
        seeds = tuple(seed * 1000 + turn * len(histories) + number for number in range(len(histories)))
        sampling = Sampling(max_new_tokens=asked.longest, seeds=seeds)
        answers = sampler.generate(histories, 1, sampling)
        observations = [text(asked.observation) for _ in histories]
        histories = [
            [*history, *answer.ids, *seen]
            for history, (answer,), seen in zip(histories, answers, observations, strict=True)
        ]
    shared = asked.prompt * asked.groups * (asked.members - 1)
    return {
        "s": time.perf_counter() - began,
        "prefill_tokens": sampler.prefilled_tokens - before,
        "tokens": sum(map(len, histories)) - shared,
        "longest": max(map(len, histories)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_turns", description=__doc__)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--members", type=int, default=8, help="episodes of a prompt")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a first prompt")
    parser.add_argument("--observation", type=int, default=600, help="tokens that a tool answers")
    parser.add_argument("--mean", type=int, default=150, help="tokens of an answer")
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--rollouts", type=int, default=2, help="timed ones, with and without what is kept")
    parser.add_argument("--tiny", action="store_true", help="a small model and short turns, on a CPU")
    asked = parser.parse_args()
    if asked.tiny:
        asked.groups, asked.members, asked.turns, asked.longest = 2, 2, 3, 16
        asked.prompt, asked.observation, asked.mean = 24, 12, 8
    model = model_of(tiny=asked.tiny)
    vocabulary = model.config.vocab_size
    sampler = InProcess(model, end_ids=range(500, 500 + vocabulary // asked.mean), compile=not asked.tiny)
    first = rollout(sampler, asked, 0, keep=True)
    print(json.dumps({"name": "gpu_turns_first"} | first), flush=True)
    line: dict[str, Any] = {"name": "gpu_turns"}
    for number in range(1, asked.rollouts + 1):
        for name, keep in (("kept", True), ("forgotten", False)):
            one = rollout(sampler, asked, number, keep=keep)
            print(json.dumps({"name": f"gpu_turns_{name}"} | one), flush=True)
            line |= {"tokens": one["tokens"], "longest": one["longest"]}
            line.setdefault(f"{name}_s", []).append(round(one["s"], 3))
            line[f"{name}_prefill_tokens"] = one["prefill_tokens"]
    line["ratio"] = round(float(np.median(line["forgotten_s"]) / np.median(line["kept_s"])), 2)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
