"""The GSM8K recipe as a script: `python train.py`. Swap in your data, rewards and prompt; the rest stays.

The trainer and its config take the arguments that TRL's take.
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from tasks import correct, layout, tags, transform

from upweight import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


def rows_of(raw):
    """Prompts as messages, with the right answer in a column that rewards read."""
    to_row, options = transform(None)
    return raw.map(to_row, **options)


def main(model=MODEL, raw=None, **changes):
    """Train, save, and return the trainer; `changes` are arguments of GRPOConfig."""
    settings = {
        "output_dir": "outputs/gsm8k-script",
        "learning_rate": 1e-5,
        "num_generations": 8,
        "max_completion_length": 256,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.1,
        "max_steps": 500,
        "logging_steps": 1,
        "save_steps": 100,
        "log_completions": True,
        "report_to": "none",
    }
    rows = rows_of(load_dataset("openai/gsm8k", "main", split="train") if raw is None else raw)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[tags, layout, correct],
        args=GRPOConfig(**{**settings, **changes}),
        train_dataset=rows,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.generate_completions(rows.select(range(1)))  # what the rewards say before any training
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:2])
