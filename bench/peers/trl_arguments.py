"""Arguments of TRL's trainers that every measured step has: it changes no weight, and nothing is saved or reported."""

from pathlib import Path
from typing import Any


def step_arguments(folder: Path, micro_batch: int, rows_per_step: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": 1_000_000,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows_per_step // micro_batch,
        "learning_rate": 0.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
