"""TRL's side of `bench.gpu_distill`: whole steps of its trainer; a line in, a JSON line out.

argv: the folder of the case, and the dtype of the student's weights.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
WORK = json.loads((FOLDER / "work.json").read_text())
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the trainer prints is not an answer

from bench.gpu_distill import Device, model_of, prompts_of, settings_of, tokenizer_of  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import DistillationConfig, DistillationTrainer  # noqa: E402  # pyright: ignore[reportMissingImports]

DEVICE = Device(WORK["device"])


class OnDemand(TrainerCallback):
    """Starts a step when a line comes in; answers when its metrics are logged."""

    training_s = sampling_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while (asked := sys.stdin.readline()) == "rest\n":
            DEVICE.rest()
        if not asked:
            os._exit(0)
        OnDemand.training_s = OnDemand.sampling_s = 0.0
        DEVICE.start()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        answer = {
            "s": OnDemand.training_s,
            "sampling_s": OnDemand.sampling_s,
            "peak_gib": DEVICE.peak_gib(),
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "tokens": logs["completions/mean_length"] * len(WORK["prompts"]),
        }
        print(json.dumps(answer), file=ANSWERS, flush=True)


def clock(trainer: Any, method: str, total: str) -> None:
    """Add the seconds of a method to a total."""
    inner = getattr(trainer, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = DEVICE.seconds()
        result = inner(*args, **kwargs)
        setattr(OnDemand, total, getattr(OnDemand, total) + DEVICE.seconds() - began)
        return result

    setattr(trainer, method, timed)


def main() -> None:
    config = DistillationConfig(
        **settings_of(WORK, FOLDER), max_steps=1_000_000, learning_rate=0.0, optim="sgd", logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1e9,
    )  # fmt: skip
    dtype = "bfloat16" if WORK["device"] == "cuda" else "float32"
    trainer = DistillationTrainer(
        model_of(WORK, "student", sys.argv[2]),
        model_of(WORK, "teacher", dtype),
        args=config,
        train_dataset=Dataset.from_list(prompts_of(WORK)),
        processing_class=tokenizer_of(WORK),
    )
    clock(trainer, "training_step", "training_s")
    clock(trainer, "_generate_and_score_completions", "sampling_s")
    trainer.add_callback(OnDemand())
    trainer.train()


main()
