"""Sampling with the lengths of real completions on a GPU: an end is drawn with probability 1 / mean, up to a cap.

python -m bench.gpu_tail [CASE ...]: one JSON line a case, with the seconds of the first call and of further calls with
other prompts, whose largest beside their median shows what is compiled or captured in the midst of a run. `slots` has
the steps of the last call by the number of slots that they decode, with the milliseconds of a step. Where
VLLM_PYTHON names a Python that has vLLM (with VLLM_PYTHONPATH as its PYTHONPATH), vLLM samples the same cases before,
without adapters or quantisation, and a line has its tokens a second and the ratio too. Each side is a process.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config

from bench.gpu_generate import difference
from bench.gpu_ours import quantised_base, random_base
from bench.gpu_share import SHAPE_7B
from bench.gpu_step import SHAPE, VOCABULARY
from upweight.config.sections.model import AdapterSection
from upweight.engine import Engine
from upweight.models.adapters.attach import attach_adapter
from upweight.models.precision import set_up_precision
from upweight.sampler.in_process import InProcess
from upweight.types import Sampling

SHAPE_135M = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {"135m": SHAPE_135M, "1.5b": SHAPE, "7b": SHAPE_7B}
ROOT = Path(__file__).parent.parent
SHORTEST, LONGEST = 128, 383  # tokens of a prompt


@dataclass(frozen=True)
class Case:
    """A model's shape, prompts and completions of each, the mean and the largest length, and how its weights are."""

    shape: str
    prompts: int
    count: int
    mean: int
    cap: int
    lora: bool = False
    calls: int = 3
    int8: bool = False  # in sampling alone
    load_in: str | None = None  # of a frozen base model


CASES = {
    "512": Case("1.5b", 32, 16, 512, 2048),
    "512_lora": Case("1.5b", 32, 16, 512, 2048, lora=True),
    "2048": Case("1.5b", 128, 16, 512, 2048, calls=2),
    "512_int8": Case("1.5b", 32, 16, 512, 2048, int8=True),
    "7b": Case("7b", 16, 16, 512, 2048),
    "7b_int8": Case("7b", 16, 16, 512, 2048, int8=True),
    "512_qlora": Case("1.5b", 32, 16, 512, 2048, lora=True, load_in="load_in_4bit"),
    "8bit": Case("1.5b", 8, 16, 256, 1024, lora=True, calls=2, load_in="load_in_8bit"),
    "7b_qlora": Case("7b", 16, 16, 512, 2048, lora=True, calls=2, load_in="load_in_4bit"),
    "long": Case("1.5b", 4, 16, 8192, 16384, calls=2),
    "small": Case("135m", 4, 16, 400, 512, calls=8),
}


def policy(case: Case) -> Any:
    """The model as a trainer holds it, of random weights."""
    base = random_base({"shape": {**SHAPES[case.shape], "max_position_embeddings": 32768}, "vocabulary": VOCABULARY})
    section = AdapterSection(kind="lora", rank=16, alpha=32, target_linear=True)
    if case.load_in is not None:
        with tempfile.TemporaryDirectory() as folder:
            base.save_pretrained(folder)
            del base
            torch.cuda.empty_cache()
            base = quantised_base(Path(folder), case.load_in)
    if not case.lora:
        return base.requires_grad_(False)
    model = attach_adapter(base, section)
    set_up_precision(model, torch.bfloat16)
    return model


def timed_blocks(slot_sampler: Any) -> list[tuple[int, int, Any, Any]]:
    """A list that gets the slots and steps of each block that is launched from now on, with events around it."""
    blocks: list[tuple[int, int, Any, Any]] = []
    steps = slot_sampler.steps
    launch = steps.run

    def run(count: int) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        pending = launch(count)
        end.record()
        blocks.append((steps.slots.size, count, begin, end))
        return pending

    steps.run = run
    return blocks


def by_slots(blocks: Sequence[tuple[int, int, Any, Any]]) -> dict[int, list[float]]:
    """Steps and milliseconds of a step, by the number of slots."""
    torch.cuda.synchronize()
    found: dict[int, list[float]] = {}
    for size, count, begin, end in blocks:
        steps, milliseconds = found.get(size, (0, 0.0))
        found[size] = [steps + count, milliseconds + begin.elapsed_time(end)]
    return {size: [steps, round(total / steps, 3)] for size, (steps, total) in sorted(found.items())}


def measure(name: str) -> dict[str, Any]:
    """Tokens a second of the second call, and what the calls took."""
    case = CASES[name]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = policy(case)
    engine = Engine(model)
    ends = range(1000, 1000 + VOCABULARY // case.mean)
    sampler = InProcess(model, engine=engine, end_ids=ends, compile=True, int8=case.int8)
    blocks = timed_blocks(sampler._sampler)
    seconds, out, prompts = [], [], []
    for call in range(case.calls):
        generator = np.random.default_rng(call)
        prompts = [
            generator.integers(0, 1000, int(n)).tolist()
            for n in generator.integers(SHORTEST, LONGEST + 1, case.prompts)
        ]
        blocks.clear()
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = sampler.generate(prompts, case.count, Sampling(max_new_tokens=case.cap, seed=call))
        seconds.append(time.perf_counter() - start)
    lengths = [len(completion.ids) for group in out for completion in group]
    return {
        "name": f"tail_{name}", "tokens_s": round(sum(lengths) / seconds[-1]), "tokens": sum(lengths),
        "first_s": round(seconds[0], 2),
        "rest_s": [round(each, 2) for each in seconds[1:]], "mean": round(float(np.mean(lengths)), 1),
        "difference": round(difference(engine, model, prompts[0], out[0][:2]), 4),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1), "slots": by_slots(blocks),
    }  # fmt: skip


def vllm_lines(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield vLLM's line for each case, by name: one process for each shape."""
    for shape in dict.fromkeys(CASES[name].shape for name in names):
        cases = {}
        for name, case in ((name, CASES[name]) for name in names if CASES[name].shape == shape):
            numbers = (case.prompts, case.count, case.mean, case.cap, SHORTEST, LONGEST, case.calls - 1)
            cases.setdefault(",".join(map(str, numbers)), []).append(name)
        with tempfile.TemporaryDirectory() as folder:
            sizes = {**SHAPES[shape], "max_position_embeddings": 32768}
            Qwen2Config(vocab_size=VOCABULARY, architectures=["Qwen2ForCausalLM"], **sizes).save_pretrained(folder)
            script = ROOT / "bench" / "peers" / "vllm_tail.py"
            log = Path(folder) / "log"
            with log.open("w") as errors, subprocess.Popen(
                [os.environ["VLLM_PYTHON"], script, folder, *cases], stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | {"PYTHONPATH": os.environ.get("VLLM_PYTHONPATH", "")},
            ) as peer:  # fmt: skip
                for text in peer.stdout or ():
                    if text.startswith('{"case"'):
                        line = json.loads(text)
                        for name in cases.get(line.pop("case"), names):
                            yield {"name": f"tail_{name}"} | line
            if peer.returncode:
                yield {"name": f"tail_{shape}_vllm", "error": log.read_text()[-2000:]}


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    if len(names) == 1 and "VLLM_PYTHON" not in os.environ:
        print(json.dumps(measure(names[0])), flush=True)
        return
    speeds: dict[str, float] = {}
    for line in vllm_lines(names) if "VLLM_PYTHON" in os.environ else ():
        speeds[line["name"]] = line.get("vllm_tokens_s", float("nan"))
        print(json.dumps(line), flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PYTHON"}
    for name in names:
        command = [sys.executable, "-m", "bench.gpu_tail", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        for text in done.stdout.splitlines():
            line = json.loads(text)
            if line["name"] in speeds:
                line["ratio"] = round(line["tokens_s"] / speeds[line["name"]], 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
