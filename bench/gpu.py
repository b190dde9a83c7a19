"""Rows of the GPU table, ours and the peers' in the same run: `python -m bench.gpu ROW ... >> rows.jsonl`.

`python -m bench.gpu --merge rows.jsonl` prints the rows of such files as a table, the last of each name.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.gpu_step import SHAPE, VOCABULARY, measure

ROOT = Path(__file__).parent.parent
STEPS, DTYPES = 3, ("float32", "bfloat16")


def step(case: str) -> Iterator[dict[str, Any]]:
    """A training step with a LoRA and with all weights, against TRL's with its default weights and with bfloat16."""
    return measure(case, ("lora", "full"), STEPS, DTYPES)


def whole(case: str) -> Iterator[dict[str, Any]]:
    """A whole GRPO step, sampling included; unsettled, since a turn of the peer takes 19 s, and the first step after a
    rest costs little beside it."""
    return measure(case, ("lora",), 2, DTYPES, settle=0)


def generate(sequences: str) -> Iterator[dict[str, Any]]:
    """Sampling with and without a LoRA, against transformers' `generate`, and vLLM where it is installed."""
    for case in (f"{sequences}_compiled", f"{sequences}_lora_compiled"):
        for line in module("bench.gpu_generate", case, "--peer"):
            yield {**line, "name": f"generate_{line['name']}"} | vllm().get(int(sequences), {})


def module(name: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """JSON lines of a module of this folder, run by itself so that its memory is gone after it."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    yield from found or [{"name": " ".join((name, *arguments)), "error": done.stderr[-2000:]}]


@cache
def vllm() -> dict[int, dict[str, Any]]:
    """Tokens a second of vLLM by sequences, run by the Python named in VLLM_PYTHON; nothing where it is not set. Where
    FlashInfer is not installed, vLLM wants VLLM_USE_FLASHINFER_SAMPLER=0."""
    if "VLLM_PYTHON" not in os.environ:
        return {}
    from transformers import Qwen2Config

    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config(vocab_size=VOCABULARY, architectures=["Qwen2ForCausalLM"], **SHAPE)
        config.save_pretrained(folder)
        script = ROOT / "bench" / "peers" / "vllm_generate.py"
        done = subprocess.run(
            [os.environ["VLLM_PYTHON"], script, folder, "16", "4", "16"],
            capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": os.environ.get("VLLM_PYTHONPATH", "")},
        )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"sequences')]
    failed = {"vllm_error": done.stderr[-2000:]}
    return {line.pop("sequences"): line for line in answers} or {64: failed, 256: failed}


ROWS: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], tuple[str, ...]]] = {
    "grpo_280": (step, ("grpo_280",)),
    "grpo_2048": (step, ("grpo_2048",)),
    "dpo": (step, ("dpo",)),
    "grpo_whole": (whole, ("grpo_whole",)),
    "distill_whole": (module, ("bench.gpu_distill",)),
    "generate_64": (generate, ("64",)),
    "generate_256": (generate, ("256",)),
    "share_1.5b": (module, ("bench.gpu_share", "1.5b")),
    "share_7b": (module, ("bench.gpu_share", "7b")),
    "long_32k": (module, ("bench.gpu_share", "32k")),
}


def merged(files: list[str]) -> str:
    """The last line of each name as a Markdown table."""
    last: dict[str, dict[str, Any]] = {}
    for file in files:
        for text in Path(file).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            last[f"{line['name']} {line.get('train', '')}".strip()] = line
    rows = ["| row | ours | peers | ratios |", "|---|---|---|---|"]
    for name, line in last.items():
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        theirs = {key: numbers[key] for key in numbers if key.startswith(("trl_", "vllm_", "generate_"))}
        ratios = {key: numbers[key] for key in numbers if key.startswith("ratio") or key == "share"}
        ours = {key: numbers[key] for key in numbers if key not in theirs and key not in ratios}
        cells = [", ".join(f"{key} {value:.4g}" for key, value in part.items()) for part in (ours, theirs, ratios)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--merge", nargs="+", metavar="FILE")
    options = parser.parse_args()
    if options.merge:
        print(merged(options.merge))
    for name in options.rows:
        if name not in ROWS:
            parser.error(f"no row '{name}'; there are {', '.join(ROWS)}")
        rows, arguments = ROWS[name]
        for line in rows(*arguments):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
