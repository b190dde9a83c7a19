"""Our side of a case: one training step for each line on stdin, one JSON line on stdout."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from upweight.engine import Engine
from upweight.engine.packing import build_batch, plan_rows
from upweight.methods.base import Method
from upweight.methods.dpo import DPO
from upweight.methods.grpo import GRPO
from upweight.types import Sample, Unit


def completed(prompt: list[int], completion: list[int], advantage: float | None = None) -> Sample:
    """A sample whose completion is scored."""
    scored = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return Sample(np.array(prompt + completion, np.int64), scored, advantage=advantage)


def grpo_units(rows: list[dict[str, Any]], method: GRPO) -> list[Unit]:
    """Groups of completions with their advantages."""
    rewards = torch.tensor([reward for row in rows for reward in row["rewards"]])
    group = torch.arange(len(rows)).repeat_interleave(len(rows[0]["rewards"]))
    advantages = iter(method.advantages(rewards[:, None], group).tolist())
    return [
        Unit((completed(row["prompt"], completion, next(advantages)),), group=n)
        for n, row in enumerate(rows)
        for completion in row["completions"]
    ]


def dpo_units(rows: list[dict[str, Any]]) -> list[Unit]:
    """Pairs of chosen and rejected completions."""
    return [
        Unit((completed(row["prompt"], row["chosen"]), completed(row["prompt"], row["rejected"])), group=n)
        for n, row in enumerate(rows)
    ]


class Side:
    """A model, its reference if the method has one, and the step that is measured."""

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        self.method: Method
        if work["name"] == "grpo_step":
            self.method = GRPO()
            self.units = grpo_units(work["rows"], self.method)
        else:
            self.method = DPO()
            self.units = dpo_units(work["rows"])
        self.budget = work["budget"]
        self.model = self._load(folder)
        self.engine = Engine(self.model)
        self.reference = self._load(folder).requires_grad_(False) if self.method.needs_reference else None
        if self.reference is not None:
            Engine(self.reference)

    def _load(self, folder: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()

    def step(self) -> float:
        """Rows, forward, loss and backward of one optimizer step -> the loss; gradients are left on the model."""
        (plan,) = plan_rows(self.units, self.budget, layout=self.engine.layout)
        batches = [build_batch([self.units[u] for u in row], self.engine.layout) for row in plan]
        counts: dict[str, torch.Tensor] = {}
        for batch in batches:
            for unit, count in self.method.count(batch).items():
                counts[unit] = counts.get(unit, torch.tensor(0.0)) + count
        total = 0.0
        for batch in batches:
            out = self.engine(self.model, batch, self.method.statistics)
            if self.reference is not None:
                with torch.no_grad():
                    reference = self.engine(self.reference, batch)
                out = dataclasses.replace(out, ref_logps_T=reference.logps_T)
            sums = self.method.loss(out, batch, {}).sums
            loss = torch.stack([value / counts[unit] for unit, value in sums.items()]).sum()
            loss.backward()
            total += loss.item()
        return total


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
        print(json.dumps(seconds | {"loss": loss, "grad_norm": norm}), file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    main(Path(sys.argv[1]), int(sys.argv[2]), channel)
