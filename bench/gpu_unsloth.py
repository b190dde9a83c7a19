"""Training steps on one GPU beside Unsloth's, one JSON line a case: `UNSLOTH_PYTHON=... python -m bench.gpu_unsloth`.

Random weights of Qwen2.5's shapes in bfloat16 or in 4 bits, rank 16 on every linear layer, in each mode of `memory`.
All sides run as processes of their own, step by step in turn, and give their memory back while they wait: SFT and DPO
on the same tokens; GRPO on completions that each side samples of the same prompts, all of the same length, for which
`training_s` is the step without sampling and rewards. A line has seconds, peaks and the tokens that each side's step
gave the model; ours shares the tokens of common beginnings, so they are fewer. UNSLOTH_PYTHON names the Python of the
environment that has Unsloth, whose versions of other libraries are its own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_ours import random_base
from bench.gpu_share import SHAPE_7B
from bench.gpu_step import END, ROOT, SHAPE, VOCABULARY, Side, measured_in_turn, pairs, warm_up, words
from bench.peers.unsloth_gpu_words import word_tokenizer

SHAPES = {"1.5b": SHAPE, "7b": SHAPE_7B}
MODES = ("lean", "balanced", "fast")
MISSING = "unsloth is not installed; UNSLOTH_PYTHON names the Python of an environment that has it"


def texts(rng: random.Random) -> list[dict[str, Any]]:
    """Thirty-two texts of 513 tokens, all of which are trained on."""
    ids = [[*words(rng, 512), END] for _ in range(32)]
    return [{"input_ids": one, "labels": one} for one in ids]


def prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Four prompts of 280 tokens, for eight completions each."""
    return [{"prompt": words(rng, 280)} for _ in range(4)]


CASES: dict[str, tuple[str, Callable[[random.Random], list[dict[str, Any]]]]] = {
    "sft": ("sft_step", texts),
    "dpo": ("dpo_step", pairs),
    "grpo_whole": ("grpo_whole_step", prompts),
}


def work_of(case: str, size: str, *, quantised: bool) -> dict[str, Any]:
    """Tokens and settings of a case, for both sides."""
    name, rows = CASES[case]
    fixed = {"micro_batch": 8, "budget": 16_384, "lora_r": 16, "completions": 8, "new_tokens": 256, "longest": 1024}
    shape = {"shape": SHAPES[size], "vocabulary": VOCABULARY, "quantised": quantised}
    return {"name": name, "rows": rows(random.Random(0)), **fixed, **shape}


def tokens_of(work: dict[str, Any]) -> dict[str, int]:
    """The tokens of a case as its data has them, and distinct ones, where a prompt counts once."""
    rows, size = work["rows"], work["completions"]
    if work["name"] == "sft_step":
        count = sum(len(row["input_ids"]) for row in rows)
        return {"data_tokens": count, "distinct_tokens": count}
    if work["name"] == "dpo_step":
        prompt = sum(len(row["prompt"]) for row in rows)
        answers = sum(len(row["chosen"]) + len(row["rejected"]) for row in rows)
        return {"data_tokens": 2 * prompt + answers, "distinct_tokens": prompt + answers}
    prompt, answers = sum(len(row["prompt"]) for row in rows), len(rows) * size * work["new_tokens"]
    return {"data_tokens": size * prompt + answers, "distinct_tokens": prompt + answers}


def unsloth_python() -> str | None:
    """The Python that has Unsloth; None where there is none."""
    python = os.environ.get("UNSLOTH_PYTHON", sys.executable)
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('unsloth') is None)"
    return python if subprocess.run([python, "-c", find], check=False).returncode == 0 else None


def save_model(size: str, folder: Path) -> None:
    """The shape's random weights and a tokenizer, for all sides to load."""
    made = random_base({"shape": SHAPES[size], "vocabulary": VOCABULARY})
    made.save_pretrained(folder)
    word_tokenizer(VOCABULARY).save_pretrained(folder)
    del made
    torch.cuda.empty_cache()


def sides_of(work: dict[str, Any], modes: Sequence[str], python: str | None, folder: Path) -> dict[str, Side]:
    """The processes of a case: ours in each mode (`lean`, or `lean_4096` with a token budget), and Unsloth's if any."""
    sides: dict[str, Side] = {}
    for name in (*modes, *(["unsloth"] if python else [])):
        here = folder / name
        here.mkdir(parents=True)
        memory, _, budget = name.partition("_")
        chosen = {"memory": memory} | ({"token_budget": int(budget)} if budget else {})
        (here / "work.json").write_text(json.dumps(work | chosen))
        theirs = [python, ROOT / "bench" / "peers" / "unsloth_gpu_step.py", here]
        ours = [sys.executable, "-m", "bench.gpu_ours", here]
        sides[name] = Side(theirs if name == "unsloth" else ours, here / "log")
    return sides


def measure(
    cases: Sequence[str], size: str, model: Path, options: argparse.Namespace, *, quantised: bool
) -> Iterator[dict[str, Any]]:
    """A line a case: our step in each mode and Unsloth's, by turns; only ours where it is not installed.

    The processes of all cases load at the same time."""
    python, modes = unsloth_python(), list(options.mode or MODES)
    modes += [f"{mode}_{budget}" for mode in modes for budget in options.budget or ()]
    sides: dict[str, dict[str, Side]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for case in cases:
                work = work_of(case, size, quantised=quantised) | {"model": str(model)}
                sides[case] = sides_of(work, modes, python, Path(temporary) / case)
            for of_case in sides.values():
                warm_up(of_case)
            for case, of_case in sides.items():
                line: dict[str, Any] = {"name": f"unsloth_{case}", "size": size}
                line |= {"adapter": "qlora" if quantised else "lora"} | ({} if python else {"unsloth": MISSING})
                line |= tokens_of(work_of(case, size, quantised=quantised))
                yield line | compared(measured_in_turn(of_case, options.steps, settle=1), modes)
                for side in of_case.values():
                    side.end()
        finally:
            for side in (side for of_case in sides.values() for side in of_case.values()):
                side.end()


def compared(line: dict[str, Any], modes: Sequence[str]) -> dict[str, Any]:
    """A case's figures with how many times as fast as Unsloth each mode is, in a step and in its training part."""
    for key, ratio in (("s", "ratio"), ("training_s", "training_ratio")):
        if theirs := line.get(f"unsloth_{key}"):
            line |= {f"{mode}_{ratio}": theirs / line[f"{mode}_{key}"] for mode in modes if f"{mode}_{key}" in line}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_unsloth", description=__doc__)
    parser.add_argument("--only", choices=list(CASES), action="append", help="measure these cases")
    parser.add_argument("--size", choices=list(SHAPES), action="append", help="of the model (default: both)")
    parser.add_argument("--adapter", choices=["lora", "qlora"], action="append", help="(default: both)")
    parser.add_argument("--mode", choices=MODES, action="append", help="of `memory` (default: all)")
    parser.add_argument("--budget", type=int, action="append", help="measure each mode with this `token_budget` too")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", action="store_true", help="only count the tokens of each case, without a GPU")
    options = parser.parse_args()
    if unsloth_python() is None:
        print(f"bench.gpu_unsloth: {MISSING}. Only our side is measured.", file=sys.stderr, flush=True)
    cases = options.only or list(CASES)
    if options.tokens:
        for case in cases:
            print(json.dumps({"name": f"unsloth_{case}"} | tokens_of(work_of(case, "1.5b", quantised=False))))
        return
    for size in options.size or SHAPES:
        with tempfile.TemporaryDirectory() as temporary:
            save_model(size, Path(temporary))
            for adapter in options.adapter or ("lora", "qlora"):
                loaded = [[case] for case in cases] if (size, adapter) == ("7b", "lora") else [cases]  # by memory
                for together in loaded:
                    for line in measure(together, size, Path(temporary), options, quantised=adapter == "qlora"):
                        print(json.dumps(rounded(line)), flush=True)


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}


if __name__ == "__main__":
    main()
