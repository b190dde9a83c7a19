"""Our side of a GPU case: the training loop's own step on random weights; a line in, a JSON line out."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench.ours import METHODS, grpo_units
from upweight.config.model import AdapterSection
from upweight.data.units import units_of
from upweight.models.adapters import attach_adapter
from upweight.train.build import trainer_parts
from upweight.train.step import StepRunner


def runner_of(work: dict[str, Any]) -> tuple[Any, StepRunner, list[Any]]:
    """Model, step runner and units of a case."""
    method = METHODS[work["name"]]
    if method.online:
        units = grpo_units(work["rows"], method)
    else:
        units = units_of([{f"{key}_ids": row[key] for key in row} for row in work["rows"]], method)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        base = Qwen2ForCausalLM(Qwen2Config(vocab_size=work["vocabulary"], **work["shape"]))
    torch.set_default_dtype(torch.float32)
    section = AdapterSection(kind="lora", rank=work["lora_r"], alpha=32, target_linear=True) if work["lora_r"] else None
    model = attach_adapter(base, section) if section else base
    model.train()
    parts = trainer_parts(
        model, method, torch.bfloat16, torch.device("cuda"), longest=4096, budget=work["budget"], checkpointing={}
    )
    runner = StepRunner(
        method, parts["engine"], Accelerator(), parts["token_budget"], parts["reference"], torch.bfloat16
    )
    return model, runner, units


def main(folder: Path) -> None:
    """Answer every line on stdin with the seconds, memory, loss and gradient norm of a step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    work = json.loads((folder / "work.json").read_text())
    model, runner, units = runner_of(work)
    for _ in sys.stdin:
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = runner.train(model, units)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        answer = {
            "s": seconds,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "loss": float(loss),
            "grad_norm": torch.nn.utils.get_total_norm(grads).item(),
            "tokens": runner.tokens,
        }
        runner.tokens = 0
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
