"""Training steps on one GPU beside Unsloth's, one JSON line a case: `UNSLOTH_PYTHON=... python -m bench.gpu_unsloth`.

Random weights of Qwen2.5's shapes in bfloat16 or in 4 bits, rank 16 on every linear layer, in each mode of `memory`.
All sides run as processes of their own, step by step in turn, and give their memory back while they wait: SFT and DPO
on the same tokens; GRPO on completions that each side samples of the same prompts, all of the same length. A line has
seconds, peaks and the tokens that each side's step gave the model; ours shares the tokens of common beginnings, so they
are fewer. UNSLOTH_PYTHON names the Python of the environment that has Unsloth, whose versions of other libraries are
its own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_share import SHAPE_7B
from bench.gpu_step import END, ROOT, SHAPE, VOCABULARY, Side, in_turn, pairs, words

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


def measure(case: str, size: str, options: argparse.Namespace, *, quantised: bool) -> dict[str, Any]:
    """Our step in each mode and Unsloth's, by turns; only ours where it is not installed."""
    python = unsloth_python()
    work = work_of(case, size, quantised=quantised)
    if options.budget is not None:
        work["token_budget"] = options.budget
    line: dict[str, Any] = {"name": f"unsloth_{case}", "size": size, "adapter": "qlora" if quantised else "lora"}
    line |= tokens_of(work) | ({} if python else {"unsloth": MISSING})
    modes = options.mode or MODES
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in (*modes, *(["unsloth"] if python else [])):
            folder = Path(temporary) / name
            folder.mkdir()
            (folder / "work.json").write_text(json.dumps(work | {"memory": name}))
            theirs = [python, ROOT / "bench" / "peers" / "unsloth_gpu_step.py", folder]
            ours = [sys.executable, "-m", "bench.gpu_ours", folder]
            sides[name] = Side(theirs if name == "unsloth" else ours, folder / "log")
        try:
            line |= in_turn(sides, options.steps)
        finally:
            for side in sides.values():
                side.end()
    if "unsloth_s" in line:
        line |= {f"{mode}_ratio": line["unsloth_s"] / line[f"{mode}_s"] for mode in modes if f"{mode}_s" in line}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_unsloth", description=__doc__)
    parser.add_argument("--only", choices=list(CASES), action="append", help="measure these cases")
    parser.add_argument("--size", choices=list(SHAPES), action="append", help="of the model (default: both)")
    parser.add_argument("--adapter", choices=["lora", "qlora"], action="append", help="(default: both)")
    parser.add_argument("--mode", choices=MODES, action="append", help="of `memory` (default: all)")
    parser.add_argument("--budget", type=int, help="`token_budget` of ours (default: what the mode chooses)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", action="store_true", help="only count the tokens of each case, without a GPU")
    options = parser.parse_args()
    if unsloth_python() is None:
        print(f"bench.gpu_unsloth: {MISSING}. Only our side is measured.", file=sys.stderr, flush=True)
    for case in options.only or CASES:
        if options.tokens:
            print(json.dumps({"name": f"unsloth_{case}"} | tokens_of(work_of(case, "1.5b", quantised=False))))
            continue
        for size in options.size or SHAPES:
            for adapter in options.adapter or ("lora", "qlora"):
                line = measure(case, size, options, quantised=adapter == "qlora")
                rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
                print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
