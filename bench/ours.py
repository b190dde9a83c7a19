"""Our side of a case: one step for each line on stdin, one JSON line on stdout."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from upweight import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer
from upweight.config.sections.model import ModelSection
from upweight.config.sections.training import OptimSection
from upweight.data.units import units_of
from upweight.engine import Engine
from upweight.methods import DPO, GRPO, KTO, ORM, ORPO, Distill, SimPO
from upweight.methods.base import Method
from upweight.models.reference import SeparateModel
from upweight.train.distill.teachers import LocalTeacher, Teachers
from upweight.train.policy import make_policy
from upweight.train.step import StepRunner
from upweight.types import Sample, Unit

METHODS: dict[str, Method] = {
    "grpo_step": GRPO(),
    "dpo_step": DPO(),
    "kto_step": KTO(),
    "orpo_step": ORPO(),
    "simpo_step": SimPO(nll_weight=0.0),
    "reward_step": ORM(),
    "moe_step": DPO(),
    "gkd_step": Distill(on_policy=0, divergence="jsd", beta=0.5),
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


def _completed(prompt: list[int], completion: list[int], advantage: float | None) -> Sample:
    """A sample whose completion is scored."""
    scored = np.arange(len(prompt) + len(completion)) >= len(prompt)
    return Sample(np.array(prompt + completion, np.int64), scored, advantage=advantage)


class TrainingPart:
    """A model, its reference if the method has one, and the training part of a step."""

    more: Mapping[str, float] = MappingProxyType({})

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        method = METHODS[work["name"]]
        if work["distils"]:
            self.units = [
                Unit((_completed(row["prompt"], row["completion"], None),), n) for n, row in enumerate(work["rows"])
            ]
        elif method.online:
            self.units = grpo_units(work["rows"], method)
        else:
            named = [{key if key == "label" else f"{key}_ids": row[key] for key in row} for row in work["rows"]]
            self.units = units_of(named, method)
        auto = AutoModelForCausalLM if method.head == "tokens" else AutoModelForSequenceClassification
        self.model = auto.from_pretrained(folder / "model", dtype=torch.float32).train()
        optim = OptimSection(token_budget=work["budget"])

        def load_teachers(student: Any, engine: Engine, attach_engine: Callable[[Any], Engine]) -> Teachers:
            teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
            parts = SeparateModel(student, teacher), attach_engine(teacher), student.config.vocab_size
            return Teachers({None: LocalTeacher(method, *parts)})

        policy = make_policy(
            self.model,
            method,
            torch.float32,
            torch.device("cpu"),
            longest=1024,
            optim=optim,
            section=ModelSection(),
            load_teachers=load_teachers if work["distils"] else None,
        )
        options = policy.token_budget, policy.reference
        more = {"teachers": policy.teachers, "router_coefficient": policy.router_coefficient}
        self.runner = StepRunner(method, policy.engine, Accelerator(cpu=True), *options, **more)

    def step(self) -> float:
        """Rows, forward, loss and backward of one optimizer step -> the loss; gradients are left on the model."""
        return self.runner.train(self.model, self.units).item()


class WholeStep:
    """A trainer that samples completions, scores them or has a teacher, and trains on them."""

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        rows, size = work["rows"], work["completions"]
        prompts = [{"prompt": " ".join(f"t{token}" for token in row["prompt"])} for row in rows]
        settings: dict[str, Any] = {
            "output_dir": str(folder / "ours"),
            "per_device_train_batch_size": work["micro_batch"],
            "gradient_accumulation_steps": len(rows) * size // work["micro_batch"],
            "max_completion_length": work["new_tokens"],
            "token_budget": work["budget"],
            "use_cpu": True,
            "bf16": False,
        }

        def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            return [sum(ids) % 101 / 100 for ids in completion_ids]

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
        given = {"train_dataset": prompts, "processing_class": tokenizer}
        if work["distils"]:
            teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
            teacher.config.name_or_path = ""  # AutoTokenizer would take the model's kind for the tokenizer's
            self.trainer = DistillationTrainer(str(folder / "model"), teacher, DistillationConfig(**settings), **given)
        else:
            config = GRPOConfig(**settings, num_generations=size)
            self.trainer = GRPOTrainer(str(folder / "model"), reward, args=config, **given)
        self.model: Any = self.trainer.model
        self.more: dict[str, float] = {}

    def step(self) -> float:
        """Completions, rewards, forward, loss and backward of one optimizer step -> the loss."""
        rollouts, runner = self.trainer.rollouts, self.trainer.runner
        assert rollouts is not None
        start = time.perf_counter()
        inputs = rollouts.next_step(runner, self.model, self.trainer.state)
        rolled = time.perf_counter()
        loss = runner.train(self.model, inputs["units"], inputs["counts"]).item()
        assert rollouts.current is not None
        tokens = sum(len(one.ids) for group in rollouts.current.groups for one in group.completions)
        self.more = {"rollout_s": rolled - start, "training_s": time.perf_counter() - rolled, "tokens": tokens}
        return loss


def main(folder: Path, threads: int, answers: TextIO) -> None:
    """Answer every line on stdin with a step's seconds, loss and gradient norm."""
    torch.set_num_threads(threads)
    work = json.loads((folder / "work.json").read_text())
    side = (WholeStep if work["new_tokens"] else TrainingPart)(folder, work)
    for _ in sys.stdin:
        side.model.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = side.step()
        seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        gradients = [weight.grad for weight in side.model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"loss": loss, "grad_norm": norm, "peak_mb": peak} | seconds | dict(side.more)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    main(Path(sys.argv[1]), int(sys.argv[2]), channel)
