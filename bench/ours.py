"""Our side of a case: one training step for each line on stdin, one JSON line on stdout."""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from upweight.data.units import units_of
from upweight.methods import DPO, GRPO, KTO, ORM, ORPO, SimPO
from upweight.methods.base import Method
from upweight.train.build import trainer_parts
from upweight.train.step import StepRunner
from upweight.types import Sample, Unit

METHODS: dict[str, Method] = {
    "grpo_step": GRPO(),
    "dpo_step": DPO(),
    "kto_step": KTO(),
    "orpo_step": ORPO(),
    "simpo_step": SimPO(nll_weight=0.0),
    "reward_step": ORM(),
}


def grpo_units(rows: list[dict[str, Any]], method: Method) -> list[Unit]:
    """Groups of completions with their advantages."""
    rewards = torch.tensor([reward for row in rows for reward in row["rewards"]])
    group = torch.arange(len(rows)).repeat_interleave(len(rows[0]["rewards"]))
    advantages = iter(method.advantages(rewards[:, None], group).tolist())
    return [
        Unit((_completed(row["prompt"], completion, next(advantages)),), group=n)
        for n, row in enumerate(rows)
        for completion in row["completions"]
    ]


def _completed(prompt: list[int], completion: list[int], advantage: float) -> Sample:
    """A sample whose completion is scored."""
    scored = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return Sample(np.array(prompt + completion, np.int64), scored, advantage=advantage)


class Side:
    """A model, its reference if the method has one, and the step that is measured."""

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        method = METHODS[work["name"]]
        if method.online:
            self.units = grpo_units(work["rows"], method)
        else:
            named = [{key if key == "label" else f"{key}_ids": row[key] for key in row} for row in work["rows"]]
            self.units = units_of(named, method)
        auto = AutoModelForCausalLM if method.head == "tokens" else AutoModelForSequenceClassification
        self.model = auto.from_pretrained(folder / "model", dtype=torch.float32).train()
        parts = trainer_parts(
            self.model, method, torch.float32, torch.device("cpu"), longest=1024, budget=work["budget"]
        )
        self.runner = StepRunner(
            method, parts["engine"], Accelerator(cpu=True), parts["token_budget"], parts["reference"]
        )

    def step(self) -> float:
        """Rows, forward, loss and backward of one optimizer step -> the loss; gradients are left on the model."""
        return self.runner.train(self.model, self.units).item()


def main(folder: Path, threads: int, answers: TextIO) -> None:
    """Answer every line on stdin with a step's seconds, loss and gradient norm."""
    torch.set_num_threads(threads)
    side = Side(folder, json.loads((folder / "work.json").read_text()))
    for _ in sys.stdin:
        side.model.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = side.step()
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        gradients = [weight.grad for weight in side.model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(seconds | {"loss": loss, "grad_norm": norm, "peak_mb": peak}), file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    main(Path(sys.argv[1]), int(sys.argv[2]), channel)
