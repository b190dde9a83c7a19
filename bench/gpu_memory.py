"""The longest GRPO row that trains in so many GiB, and what `upweight fits` says of it: `python -m bench.gpu_memory`.

Random weights of Qwen2.5's shapes, bfloat16, rank 16 on every linear layer, the memory of the process limited to each
of the caps. A case tries the length that `fits` promises (`--steps` with AdamW), then longer or shorter ones while its
minutes last, and prints one JSON line at once: lengths that trained and failed, what was promised by part, the peak and
the ratio of both. Each model and mode has a process of its own; one that ends, or a case that exceeds `--limit`, is a
line with the reason, and the next case begins in a fresh process. `--tiny` rehearses all of it on a CPU, where the cap
is compared with the peak of the process afterwards. With `--unsloth`, the Python named in UNSLOTH_PYTHON trains rows of
SFT under the same caps with Unsloth, from `--first` tokens on, each half as long again as the one before.
"""

import argparse
import gc
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.gpu_share import SHAPE_7B
from bench.gpu_step import SHAPE, VOCABULARY
from upweight.config import Config
from upweight.config.load import parse_config
from upweight.engine.activations import enable_checkpointing
from upweight.methods import GRPO
from upweight.models.adapters.attach import attach_adapter
from upweight.models.kernels.tiled_mlp import tile_blocks
from upweight.models.load import load_model
from upweight.models.memory import GIB
from upweight.models.memory_plan import MemoryPlan, ModelNeeds, plan_memory
from upweight.train.policy import make_policy, token_budget
from upweight.train.step import StepRunner
from upweight.types import Sample, Unit

TINY = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "1.5b_lora": (SHAPE, "lora"),
    "7b_lora": (SHAPE_7B, "lora"),
    "7b_qlora": (SHAPE_7B, "qlora"),
}
MODES = ("lean", "balanced", "fast")
ROOT = Path(__file__).parent.parent
CAPS = (8, 12, 16, 24, 80)
TINY_CAPS = (0.001, 0.02, 1.0)
STEP = 128  # lengths are multiples of it
SHORTEST, PROMPT = 256, 128
GROWTH = 1.2  # from a length that trained to the next one, and back from one that did not


class TooMuch(Exception):
    """A step needed more than the cap, on a CPU, where nothing stops it."""


@dataclass
class Subject:
    """A model that trains rows, and what is estimated for it."""

    model: Any
    content: dict[str, Any]  # of its config
    folder: Path
    device: torch.device

    def __post_init__(self) -> None:
        self.config = self.config_of(SHORTEST)
        self.needs = ModelNeeds.of(self.config)
        on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        options = {"optim": self.config.optim, "section": self.config.model}
        policy = make_policy(self.model, GRPO(), dtype, self.device, longest=SHORTEST, **options)
        self.width = dtype.itemsize / 2  # the estimate is for two bytes a number
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=on_gpu)
        if policy.copies is not None:
            policy.copies.follow(self.optimizer)
        accelerator, engine = Accelerator(cpu=not on_gpu), policy.engine
        self.reserved = policy.reserved
        self.new_runner: Callable[[int], StepRunner] = lambda budget: StepRunner(
            GRPO(), engine, accelerator, budget, policy.reference, dtype
        )
        self.runner = self.new_runner(policy.token_budget)
        self.cap = 0.0
        self.before = 0

    def start(self, cap: float) -> None:
        """Begin a case: limit the memory, and forget what was measured under another limit."""
        self.cap = cap
        self.free()
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0))
        else:
            self.before = _resident("VmRSS")
        optim, text = self.config.optim, self.model.config.get_text_config()
        budget = token_budget(text, self.device, optim, reserved=self.reserved)
        self.runner = self.new_runner(budget)
        if optim.tiled_mlp:
            tile_blocks(self.model, budget)
        if optim.gradient_checkpointing and not optim.checkpointing_args.get("every_layer"):
            keep = optim.checkpointing_args.get("keep")
            enable_checkpointing(self.model, optimizer=optim.optimizer, keep=keep, one_node=True)

    def free(self) -> None:
        """Drop gradients and what the allocator holds unused."""
        self.model.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(self, length: int, steps: int = 2) -> float:
        """Train on a row of so many tokens; return the peak in bytes."""
        self.free()
        _reset_peak(self.device)
        unit = _row(length)
        for _ in range(steps):
            self.model.zero_grad()
            self.runner.train(self.model, [unit])
            self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        peak = _resident("VmHWM") - self.before
        if peak > self.cap:
            raise TooMuch(f"{peak / GIB:.2f} GiB")
        return peak

    def config_of(self, length: int) -> Config:
        """The config whose longest sequence has so many tokens."""
        trl = {"max_completion_length": length - PROMPT, "release_sampler": True}  # rows are not sampled here
        content = self.content | {"max_prompt_length": PROMPT, "trl": trl}
        return parse_config(content, folder=self.folder, fragment=True)

    def plan(self, length: int) -> MemoryPlan:
        """What `fits` says of rows of so many tokens under the cap, in half precision."""
        return plan_memory(self.config_of(length), self.cap, model=self.needs)

    def promised(self) -> int:
        """The longest row that `fits` promises under the cap."""
        return int(self.plan(SHORTEST).longest / self.width) // STEP * STEP


def _row(length: int) -> Unit:
    """A prompt with one completion, of random tokens."""
    ids = np.random.default_rng(length).integers(2, 1000, length)
    return Unit((Sample(ids, np.arange(length) >= PROMPT, advantage=1.0),))


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak of this process


def _resident(name: str) -> int:
    """Bytes of this process that are in memory: now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def build(name: str, mode: str, folder: Path, tiny: bool) -> Subject:
    """The model of a case on its device."""
    shape, kind = CASES[name]
    sizes = TINY if tiny else shape
    device = torch.device("cpu" if tiny else "cuda")
    made = Qwen2Config(vocab_size=1024 if tiny else VOCABULARY, **{**sizes, "max_position_embeddings": 1 << 20})
    made.architectures = ["Qwen2ForCausalLM"]
    made.save_pretrained(folder)
    adapter = {"adapter": kind, "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
    content: dict[str, Any] = {"base_model": str(folder), "rl": "grpo", "memory": mode, "optimizer": "adamw_torch"}
    content |= adapter | ({"load_in_4bit": True} if kind == "qlora" else {})
    config = parse_config(content, folder=folder, fragment=True)
    torch.manual_seed(0)
    made_dtype = torch.float32 if tiny else torch.bfloat16
    torch.set_default_dtype(made_dtype)
    with device:
        base: Any = AutoModelForCausalLM.from_config(made)
    torch.set_default_dtype(torch.float32)
    if kind == "qlora":
        base.save_pretrained(folder)
        del base
        gc.collect()
        torch.cuda.empty_cache()
        base = load_model(config.model, made_dtype, head="tokens", tokenizer=None, adapter=config.adapter, seed=0)
    model: Any = attach_adapter(base, config.adapter)
    return Subject(model.train(), content, folder, device)


def search(subject: Subject, cap: float, options: argparse.Namespace) -> dict[str, Any]:
    """Lengths that trained and failed under a cap, from the promised one on, and the peak beside the estimate."""
    began, limit = time.perf_counter(), options.longest
    subject.start(cap)
    promised = subject.promised()
    worked, failed, peaks, why = 0, 0, {}, ""
    length = min(max(promised, SHORTEST), limit)
    while length >= SHORTEST and length not in (worked, failed):
        trial = time.perf_counter()
        try:
            peaks[length] = subject.train(length, options.steps if not peaks and promised else 2)
            worked = max(worked, length)
        except (torch.OutOfMemoryError, TooMuch) as error:
            failed, why = length, str(error).splitlines()[0][:160]
        took = time.perf_counter() - trial
        if (worked and failed) or worked >= limit or not (worked or promised):
            break
        if time.perf_counter() - began + (GROWTH**2 * took if worked else took) > 60 * options.minutes:
            break
        wanted = length * GROWTH if worked else length / GROWTH
        length = min(max(int(wanted) // STEP * STEP, length + STEP if worked else 0), limit)
    subject.free()
    line = {"promised": promised, "trained": worked, "failed": failed, "limit": limit, "steps": options.steps}
    if worked:
        line |= beside(subject, promised if promised in peaks else worked, peaks)
    kept = worked >= min(promised, limit) if promised else not worked
    line |= {"promise": "kept" if kept else "broken" if promised else "too careful", "why": why}
    return line | {"seconds": time.perf_counter() - began}


def beside(subject: Subject, length: int, peaks: dict[int, float]) -> dict[str, Any]:
    """What `fits` says of a length, by part, beside the peak that was measured."""
    need, width = subject.plan(length).need, subject.width
    parts = {"weights": need.weights * width, "training": need.training, "activations": need.activations * width}
    peak, predicted = peaks[length], sum(parts.values())
    line = {"peak_at": length, "peak_gib": peak / GIB, "predicted_gib": predicted / GIB, "ratio": predicted / peak}
    return line | {f"predicted_{name}_gib": size / GIB for name, size in parts.items()}


def measure_here(name: str, mode: str, caps: Sequence[float], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line when a model is ready, and one for each cap."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subject = build(name, mode, Path(folder), options.tiny)
        for length in (1024, 1536):  # kernels are compiled before a case counts its minutes
            subject.start(float(2**50))
            subject.train(length, steps=1)
        yield {"name": name, "mode": mode, "ready_s": time.perf_counter() - began}
        for cap in caps:
            yield {"name": name, "mode": mode, "gib": cap} | search(subject, cap * GIB, options)


def measure(name: str, mode: str, caps: Sequence[float], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of a model in one mode, from a process of its own; another one goes on where it ends too early."""
    left = list(caps)
    while left:
        for line in answers_of(name, mode, left, options):
            yield line
            if "gib" in line or "error" in line:
                left = [cap for cap in left if cap != line.get("gib", left[0])]
            if "error" in line:
                break


def answers_of(name: str, mode: str, caps: list[float], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of one process, each within the limit; an error for the first cap that has none."""
    command = [sys.executable, "-m", "bench.gpu_memory", "--inside", "--only", name, "--mode", mode]
    command += [f"--gib={cap}" for cap in caps] + ["--tiny"] * options.tiny
    command += [f"--{key}={getattr(options, key)}" for key in ("longest", "minutes", "steps")]
    env = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=env)
        assert process.stdout is not None
        waiting = list(caps)
        try:
            while waiting:
                if not select.select([process.stdout], [], [], options.limit)[0]:
                    why = f"no line within {options.limit:.0f} s"
                    yield {"name": name, "mode": mode, "gib": waiting[0], "error": why}
                    return
                if not (text := process.stdout.readline()):
                    log.seek(0)
                    why = (log.read().strip().splitlines() or ["nothing was printed"])[-1][-300:]
                    code = process.wait()
                    yield {"name": name, "mode": mode, "gib": waiting[0], "error": f"the process ended ({code}): {why}"}
                    return
                if text.startswith("{"):
                    line = json.loads(text)
                    waiting = [cap for cap in waiting if cap != line.get("gib")]
                    yield line
        finally:
            process.kill()
            process.wait()


def measure_unsloth(name: str, caps: Sequence[float], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Unsloth's line for each cap, or why there is none."""
    shape, kind = CASES[name]
    work = {"shape": {**shape, "max_position_embeddings": 1 << 20}, "vocabulary": VOCABULARY, "lora_r": 16}
    work |= {key: getattr(options, key) for key in ("first", "longest", "minutes")} | {"quantised": kind == "qlora"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work.json").write_text(json.dumps(work))
        script = ROOT / "bench" / "peers" / "unsloth_longest.py"
        command = [os.environ.get("UNSLOTH_PYTHON", sys.executable), str(script), folder, *map(str, caps)]
        log = Path(folder) / "log"
        with log.open("w") as errors:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        for text in done.stdout.splitlines():
            yield {"name": name, "unsloth": True} | json.loads(text)
        if done.returncode:
            yield {"name": name, "unsloth": True, "error": log.read_text()[-1500:]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_memory", description=__doc__)
    parser.add_argument("--only", choices=list(CASES), action="append", help="measure these models")
    parser.add_argument("--mode", choices=MODES, action="append", help="values of the key `memory` (default: all)")
    parser.add_argument("--gib", type=float, action="append", help="caps (default: 8, 12, 16, 24, 80)")
    parser.add_argument("--longest", type=int, default=32_768, help="longest row that is tried")
    parser.add_argument("--minutes", type=float, default=0.8, help="after which a case tries no further length")
    parser.add_argument("--steps", type=int, default=2, help="steps at the promised length (two at any other)")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a case without a line is ended")
    parser.add_argument("--unsloth", action="store_true", help="measure Unsloth instead")
    parser.add_argument("--first", type=int, default=4096, help="shortest row that Unsloth tries")
    parser.add_argument("--tiny", action="store_true", help="rehearse with a tiny model on the CPU")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # in the process of one model
    options = parser.parse_args()
    caps = options.gib or (TINY_CAPS if options.tiny else CAPS)
    for name in options.only or CASES:
        quantised = CASES[name][1] == "qlora"
        if quantised and (options.tiny or importlib.util.find_spec("bitsandbytes") is None):
            why = "4-bit weights need a GPU" if options.tiny else "bitsandbytes is not installed"
            print(json.dumps({"name": name, "skipped": why}), flush=True)
            continue
        for line in measure_unsloth(name, caps, options) if options.unsloth else ():
            print(json.dumps(line), flush=True)
        for mode in [] if options.unsloth else options.mode or MODES:
            lines = measure_here if options.inside else measure
            for line in lines(name, mode, caps, options):
                rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}
                print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
