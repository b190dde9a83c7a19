"""Training steps on one GPU against TRL's, one JSON line a case: `python -m bench.gpu_step`.

Random weights of Qwen2.5-1.5B's shape, bfloat16 compute, gradient checkpointing; LoRA of rank 16 on every linear layer,
or all weights trained. Both sides run as processes of their own, one after the other, on the same tokens. They report
the training part of a step (forward, loss, backward), the peak of GPU memory, the loss and the gradient norm.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
VOCABULARY = 151_936
END = 0


def groups(rng: random.Random, prompt: int, completion: int) -> list[dict[str, Any]]:
    """Four prompts with eight completions each."""
    return [
        {
            "prompt": words(rng, prompt),
            "completions": [[*words(rng, completion - 1), END] for _ in range(8)],
            "rewards": [rng.random() for _ in range(8)],
        }
        for _ in range(4)
    ]


def pairs(rng: random.Random) -> list[dict[str, Any]]:
    """Sixteen pairs, about 10,600 tokens."""
    return [
        {
            "prompt": words(rng, rng.randint(60, 240)),
            "chosen": [*words(rng, rng.randint(60, 300)), END],
            "rejected": [*words(rng, rng.randint(60, 300)), END],
        }
        for _ in range(16)
    ]


def words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


CASES: dict[str, tuple[str, Any]] = {
    "grpo_280": ("grpo_step", lambda rng: groups(rng, 280, 256)),
    "grpo_2048": ("grpo_step", lambda rng: groups(rng, 2048, 256)),
    "dpo": ("dpo_step", pairs),
    # Sampled too: 4 x 8 completions of 256 tokens, whose end is a token that the model does not have.
    "grpo_whole": ("grpo_whole_step", lambda rng: [{"prompt": words(rng, 280)} for _ in range(4)]),
}


def write_work(case: str, lora: bool, folder: Path) -> None:
    """Tokens and settings of a case, for both sides."""
    name, rows = CASES[case]
    work = {
        "name": name,
        "rows": rows(random.Random(0)),
        "micro_batch": 8,
        "budget": 16_384,
        "lora_r": 16 if lora else 0,
        "shape": SHAPE,
        "vocabulary": VOCABULARY,
        "completions": 8,
        "new_tokens": 256,
    }
    (folder / "work.json").write_text(json.dumps(work))


def run(command: list[Any], steps: int) -> dict[str, float]:
    """Medians over a side's steps, after three to warm up."""
    done = subprocess.run(
        command, input="step\n" * (steps + 3), capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) < steps + 3:
        return {"error": done.stderr[-2000:]}  # pyright: ignore[reportReturnType]
    return {key: median(line[key] for line in lines[3:]) for key in lines[0]}


def measure(case: str, what: str, steps: int, peers: Sequence[str]) -> dict[str, Any]:
    """Our step and TRL's with weights in each of the dtypes `peers`, one after the other, on the same tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_work(case, what == "lora", folder)
        line: dict[str, Any] = {"name": f"gpu_{case}", "train": what}
        ours = run([sys.executable, "-m", "bench.gpu_ours", folder], steps)
        line |= {f"ours_{key}": value for key, value in ours.items()}
        for dtype in peers:
            theirs = run([sys.executable, ROOT / "bench" / "peers" / "trl_gpu_step.py", folder, dtype], steps)
            line |= {f"trl_{dtype}_{key}": value for key, value in theirs.items()}
            if "s" in theirs and "s" in ours:
                line[f"ratio_{dtype}"] = round(theirs["s"] / ours["s"], 2)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_step", description=__doc__)
    parser.add_argument("--only", choices=list(CASES), action="append", help="measure these cases")
    parser.add_argument("--train", choices=["lora", "full"], action="append", help="what is trained (default: both)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--peer", choices=["float32", "bfloat16"], action="append", help="TRL's weights; its default is float32"
    )
    options = parser.parse_args()
    for case in options.only or CASES:
        for what in options.train or ["lora", "full"]:
            print(json.dumps(measure(case, what, options.steps, options.peer or [])), flush=True)


if __name__ == "__main__":
    main()
