"""Training steps on one GPU against TRL's, one JSON line a case: `python -m bench.gpu_step`.

Random weights of Qwen2.5-1.5B's shape, bfloat16 compute, gradient checkpointing; LoRA of rank 16 on every linear layer,
or all weights trained. Both sides run as processes of their own, step by step in turn, on the same tokens. They report
the training part of a step (forward, loss, backward), the peak of GPU memory, the loss and the gradient norm.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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


def work_of(case: str, lora: bool) -> dict[str, Any]:
    """Tokens and settings of a case, for both sides."""
    name, rows = CASES[case]
    return {
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


class Side:
    """A process that answers each line with one step's JSON line; what else it says goes to a file."""

    def __init__(self, command: list[Any], log: Path) -> None:
        self._log = log
        env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, bufsize=1, cwd=ROOT, env=os.environ | env,
            )  # fmt: skip
        self.error: str | None = None

    def ask(self, what: str = "step") -> None:
        """Start a step; or have it "rest", which gives back the memory that it holds for its next step."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{what}\n")

    def answer(self) -> dict[str, float]:
        """What the step gave; nothing when the process ended instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.error = self._log.read_text()[-1500:]
        return {}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def in_turn(sides: dict[str, Side], steps: int, settle: int = 1) -> dict[str, Any]:
    """Medians of each side's steps. All load at the same time, and make a first step that does not count; then one
    works while the others wait and leave it the GPU's memory."""
    warm_up(sides)
    return measured_in_turn(sides, steps, settle)


def warm_up(sides: dict[str, Side]) -> None:
    """A step of each side that does not count, in which it loads and compiles."""
    for name, side in sides.items():
        _log_turn(0, name)
        _steps_of(side, (False,))


def measured_in_turn(sides: dict[str, Side], steps: int, settle: int) -> dict[str, Any]:
    """Medians of so many steps of each side; to `settle`, before one that counts it makes some that do not."""
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(1, 1 + steps):
        for name, side in sides.items():
            _log_turn(turn, name)
            answers[name] += _steps_of(side, (*[False] * settle, True))
    line: dict[str, Any] = {}
    for name, side in sides.items():
        measured = {"error": side.error} if side.error is not None else {
            key: median(answer[key] for answer in answers[name]) for key in answers[name][0]
        }  # fmt: skip
        line |= {f"{name}_{key}": value for key, value in measured.items()}
    return line


def _log_turn(turn: int, name: str) -> None:
    print(f"{time.strftime('%X')} turn {turn}: {name}", file=sys.stderr, flush=True)


def _steps_of(side: Side, counted: Sequence[bool]) -> list[dict[str, float]]:
    """Steps of one side, after which it rests; the answers of those that are counted."""
    answers = []
    for counts in counted:
        if side.error is None:
            side.ask()
            answer = side.answer()
            answers += [answer] if counts else []
    side.ask("rest")
    return answers


def measure(
    case: str, trained: Sequence[str], steps: int, peers: Sequence[str], settle: int = 1, **work: Any
) -> Iterator[dict[str, Any]]:
    """Our step and TRL's with weights in each of the dtypes `peers`, by turns, on the same tokens; a line for each
    of `trained`, "lora" or "full"."""
    with tempfile.TemporaryDirectory() as temporary:
        sides: dict[str, Side] = {}
        for what in trained:
            for name in ("ours", *(f"trl_{dtype}" for dtype in peers)):
                folder = Path(temporary) / f"{what}_{name}"
                folder.mkdir()
                (folder / "work.json").write_text(json.dumps(work_of(case, what == "lora") | work))
                theirs = [ROOT / "bench" / "peers" / "trl_gpu_step.py", folder, name.removeprefix("trl_")]
                command = ["-m", "bench.gpu_ours", folder] if name == "ours" else theirs
                sides[f"{what}_{name}"] = Side([sys.executable, *command], folder / "log")
        try:
            found = in_turn(sides, steps, settle)
        finally:
            for side in sides.values():
                side.end()
    for what in trained:
        line = {key.removeprefix(f"{what}_"): value for key, value in found.items() if key.startswith(f"{what}_")}
        ratios = {
            f"ratio_{dtype}": round(line[f"trl_{dtype}_s"] / line["ours_s"], 2)
            for dtype in peers
            if "ours_s" in line and f"trl_{dtype}_s" in line
        }
        yield {"name": f"gpu_{case}", "train": what} | line | ratios


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
        for line in measure(case, options.train or ["lora", "full"], options.steps, options.peer or []):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
