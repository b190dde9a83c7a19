"""GRPO by one library or the other with the same script: a JSON line with held-out accuracy by step and second.

python bench/peers/grpo_learn.py trl|upweight --model FOLDER --rows FOLDER [--steps N] [--seed N]

Accuracy is that of one answer to each held-out problem, drawn at temperature 1 by transformers' `generate` with the
same seed on either side; its seconds are not counted.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, TrainerCallback

sys.path.append(str(Path(__file__).parents[2] / "examples" / "three_numbers"))
from problems import correct

NEW_TOKENS = 48


class Held(TrainerCallback):
    """Held-out accuracy before the first step and after every few, beside the seconds of training alone."""

    def __init__(self, rows: Dataset, tokenizer: Any, every: int) -> None:
        self.rows, self.tokenizer, self.every = rows, tokenizer, every
        self.points: list[dict[str, float]] = []
        self.began = self.seconds = 0.0

    def measure(self, model: Any, step: int) -> None:
        texts = self.tokenizer.apply_chat_template(
            list(self.rows["prompt"]), tokenize=False, add_generation_prompt=True
        )
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        was = model.training
        model.eval()
        device = model.device
        drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with (
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(0)
            ids = model.generate(**batch.to(device), max_new_tokens=NEW_TOKENS, use_cache=True, **drawing)
        model.train(was)
        answers = self.tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        right = correct([[{"content": text}] for text in answers], self.rows["answer"])
        point = {"step": step, "seconds": round(self.seconds, 2), "accuracy": round(sum(right) / len(right), 4)}
        self.points.append(point)
        print(point, answers[0][:60], file=sys.stderr, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.measure(model, 0)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self.began
        self.measure(model, state.global_step)
        self.began = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["trl", "upweight"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    library = importlib.import_module(asked.library)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    train, held_out = (
        load_dataset("json", data_files=str(asked.rows / f"{name}.jsonl"), split="train")
        for name in ("asked", "held_out")
    )
    held = Held(held_out, tokenizer, asked.every)
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.GRPOConfig(
            output_dir=folder, max_steps=asked.steps, per_device_train_batch_size=asked.prompts * asked.members,
            num_generations=asked.members, max_completion_length=NEW_TOKENS, learning_rate=asked.rate,
            lr_scheduler_type="constant", warmup_steps=0, beta=0.0, temperature=1.0, bf16=torch.cuda.is_available(),
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], seed=asked.seed,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = library.GRPOTrainer(
            model=asked.model, reward_funcs=[correct], args=arguments, train_dataset=train,
            processing_class=tokenizer, callbacks=[held],
        )  # fmt: skip
        trainer.train()
    rewards = [round(line["reward"], 4) for line in trainer.state.log_history if "reward" in line]
    line = {"library": asked.library, "seed": asked.seed, "held_out": held.points, "reward": rewards}
    print(json.dumps(line), flush=True)


main()
