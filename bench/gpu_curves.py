"""How the cost of a GRPO training step grows: one thing varied at a time, one JSON line a point.

python -m bench.gpu_curves [AXIS ...]: random weights of Qwen2.5-1.5B's shape with a LoRA, forward and backward.
"""

import argparse
import gc
import json
import random
from typing import Any

import torch

from bench.gpu_ours import runner_of
from bench.gpu_profile import timed
from bench.gpu_step import SHAPE

BASE = {"prompt": 512, "completion": 256, "members": 8, "groups": 4, "vocabulary": 65_536}
AXES = {
    "prompt": (128, 512, 2048, 8192),
    "completion": (64, 256, 1024, 4096),
    "members": (2, 8, 32, 128),
    "groups": (1, 4, 16, 64),
    "vocabulary": (16_384, 65_536, 262_144),
}


def work_of(size: dict[str, int]) -> dict[str, Any]:
    """Random groups of one size."""
    rng = random.Random(0)

    def words(length: int) -> list[int]:
        return rng.choices(range(2, size["vocabulary"]), k=length)

    rows = [
        {
            "prompt": words(size["prompt"]),
            "completions": [words(size["completion"]) for _ in range(size["members"])],
            "rewards": [rng.random() for _ in range(size["members"])],
        }
        for _ in range(size["groups"])
    ]
    return {
        "name": "grpo_step", "rows": rows, "budget": 16_384, "lora_r": 16, "shape": SHAPE,
        "vocabulary": size["vocabulary"],
    }  # fmt: skip


def point(axis: str, value: int) -> dict[str, Any]:
    """Seconds, tokens and memory of a step of one size."""
    size = BASE | {axis: value}
    model, runner, units = runner_of(work_of(size))

    def step() -> None:
        model.zero_grad()
        runner.train(model, units)

    step()
    step()
    runner.tokens = 0
    found = timed(step, repeats=3)
    tokens = runner.tokens // 3
    return {
        "axis": axis, "value": value, "s": round(found["s"], 4), "distinct_tokens": tokens,
        "us_token": round(found["s"] / tokens * 1e6, 2), "peak_gib": found["peak_gib"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_curves", description=__doc__)
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=", ".join(AXES))
    for axis in parser.parse_args().axes or AXES:
        for value in AXES[axis]:
            print(json.dumps(point(axis, value)), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
