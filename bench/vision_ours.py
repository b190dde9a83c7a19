"""Our side of a case with images: a step of our trainers for each line on stdin, one JSON line on stdout.

argv: the folder of the case, the dtype of the weights, and the threads of a CPU (0: on a GPU, in bfloat16).
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.vision_parts import adapter, model, pair_rows, processor, prompt_rows
from upweight import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from upweight.data.images.records import image_refs
from upweight.data.units import units_of
from upweight.types import Sample, Unit


def settings_of(work: dict[str, Any], folder: Path, rows: int, *, gpu: bool) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "ours"),
        "per_device_train_batch_size": work["micro_batch"],
        "gradient_accumulation_steps": rows // work["micro_batch"],
        "token_budget": 16_384,
        "gradient_checkpointing": gpu,
        "bf16": gpu,
        "use_cpu": not gpu,
        "report_to": "none",
        "save_strategy": "no",
    }


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 101 / 100 for ids in completion_ids]


def grpo_trainer(work: dict[str, Any], folder: Path, made: Any, *, gpu: bool) -> Any:
    config = GRPOConfig(
        **settings_of(work, folder, len(work["rows"]) * work["completions"], gpu=gpu),
        num_generations=work["completions"],
        max_completion_length=work["new_tokens"],
    )
    options = {"processing_class": processor(work), "peft_config": adapter(work)}
    return GRPOTrainer(made, reward, args=config, train_dataset=prompt_rows(work), **options)


def replayed(work: dict[str, Any], trainer: Any) -> list[Unit]:
    """The case's completions with their advantages, after the prompts as the trainer encoded them."""
    rewards = torch.tensor([reward for row in work["rows"] for reward in row["rewards"]])
    group = torch.arange(len(work["rows"])).repeat_interleave(work["completions"])
    advantages = iter(trainer.method.advantages(rewards[:, None], group).tolist())
    units = []
    for number, (row, prompt) in enumerate(zip(work["rows"], trainer.encode(prompt_rows(work), "rows"), strict=True)):
        for completion in row["completions"]:
            ids = np.array([*prompt["prompt_ids"], *completion], np.int64)
            scored = np.arange(len(ids)) >= len(prompt["prompt_ids"])
            sample = Sample(ids, scored, advantage=next(advantages), images=image_refs(prompt))
            units.append(Unit((sample,), group=number))
    return units


def step_of(work: dict[str, Any], folder: Path, dtype: torch.dtype, *, gpu: bool) -> tuple[Any, Callable[[], Tensor]]:
    """The trainer of a case, and its step."""
    made = model(work, "cuda" if gpu else "cpu", dtype)
    if work["name"] == "vlm_dpo_step":
        config = DPOConfig(**settings_of(work, folder, len(work["rows"]), gpu=gpu), max_length=None)
        options = {"processing_class": processor(work), "peft_config": adapter(work)}
        trainer: Any = DPOTrainer(made, args=config, train_dataset=pair_rows(work), **options)
        units = units_of(list(trainer.train_dataset), trainer.method)
        return trainer, lambda: trainer.runner.train(trainer.model, units)
    trainer = grpo_trainer(work, folder, made, gpu=gpu)
    if work["name"] == "vlm_grpo_step":
        units = replayed(work, trainer)
        return trainer, lambda: trainer.runner.train(trainer.model, units)

    def whole() -> Tensor:
        inputs = trainer.rollouts.next_step(trainer.runner, trainer.model, trainer.state)
        return trainer.runner.train(trainer.model, inputs["units"], inputs["counts"])

    return trainer, whole


def main(folder: Path, dtype: str, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    gpu = threads == 0
    if not gpu:
        torch.set_num_threads(threads)
    trainer, step = step_of(json.loads((folder / "work.json").read_text()), folder, getattr(torch, dtype), gpu=gpu)
    wait = torch.cuda.synchronize if gpu else lambda: None
    for asked in sys.stdin:
        trainer.model.zero_grad()
        if asked == "rest\n":
            torch.cuda.empty_cache()
            continue
        wait()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        start, cpu = time.perf_counter(), time.process_time()
        loss = step()
        wait()
        answer = {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        grads = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
        answer |= {"loss": float(loss), "grad_norm": torch.nn.utils.get_total_norm(grads).item()}
        answer["tokens"], trainer.runner.tokens = trainer.runner.tokens, 0
        peak = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(answer | {"peak_gib": peak / 2**30}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
