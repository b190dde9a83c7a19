"""The peer's GRPO run on an example's rows and rewards: one JSON line with its rewards and seconds by step."""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds since the first step began."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = self.began or time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(round(time.perf_counter() - self.began, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("folder", "gguf", "rows", "tasks", "rewards"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    asked = parser.parse_args()
    spec = importlib.util.spec_from_file_location("tasks", asked.tasks)
    tasks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tasks)
    model = AutoModelForCausalLM.from_pretrained(
        asked.folder, gguf_file=asked.gguf, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(asked.folder, gguf_file=asked.gguf)
    rows = [json.loads(line) for line in Path(asked.rows).read_text().splitlines()]
    if hasattr(tasks, "transform"):
        change = tasks.transform(None)[0]
        rows = [change(row) for row in rows]
    clock = Clock()
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=asked.steps, per_device_train_batch_size=asked.batch,
        num_generations=8, max_completion_length=asked.new, learning_rate=asked.rate, bf16=True,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], seed=asked.seed,
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[getattr(tasks, name) for name in asked.rewards.split(",")],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    rewards = [round(row["reward"], 3) for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"peer": "trl", "reward": rewards, "seconds": clock.seconds}), file=sys.stdout, flush=True)


main()
