"""One script on rows with images, run with TRL or with Upweight in its place; see `parity_script.py`.

    python vision_parity_script.py trl|upweight [case ...]

prints the losses and gradient norms of each case as one JSON line.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from tiny_vision import drawn_image, processor, vision_model

QUESTIONS = ("Why?", "How many?", "What is red?", "Who was it?", "Name a fish.", "And then?", "1 + 2?", "Go on.")
GOOD = ("As it rains.", "Three.", "A ripe apple", "My aunt Ada", "Cod", "They slept well.", "3", "So he went home")
BAD = ("No.", "Many of them!", "Blue", "Nobody", "A cow, maybe", "?", "It is five", "I will not")
SIZES = ((48, 32), (32, 64), (64, 48))
LARGEST = {"max_length": None}


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def images(number: int, count: int = 1) -> list[Any]:
    return [drawn_image(7 * number + one, *SIZES[(number + one) % len(SIZES)]) for one in range(count)]


def rows(kind: str) -> list[dict[str, Any]]:
    """Rows of a kind, each with an image; every third of "two images" with two."""
    made = []
    for number, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True)):
        row: dict[str, Any] = {"images": images(number, 2 if kind == "two images" and number % 3 == 0 else 1)}
        prompt, answer = said("user", question), said("assistant", good)
        if kind == "messages":
            row["messages"] = prompt + answer
        elif kind in ("completions", "two images"):
            row |= {"prompt": prompt, "completion": answer}
        elif kind == "pairs":
            row |= {"prompt": prompt, "chosen": answer, "rejected": said("assistant", bad)}
        else:
            wanted = bool(number % 3)
            row |= {"prompt": prompt, "completion": said("assistant", good if wanted else bad), "label": wanted}
        made.append(row)
    return made


def case(trainer: str, kind: str, model: str = "qwen2_5_vl", **config: Any) -> dict[str, Any]:
    return {"trainer": trainer, "rows": kind, "model": model, "config": LARGEST | config}


CASES: dict[str, dict[str, Any]] = {
    "sft completions": case("SFT", "completions"),
    "sft two images": case("SFT", "two images", "llava"),  # Qwen needs tokens between two images
    "sft mistral3": case("SFT", "completions", "mistral3"),
    "sft gemma3": case("SFT", "completions", "gemma3"),
    "sft idefics3": case("SFT", "completions", "idefics3"),
    "dpo": case("DPO", "pairs"),
    "dpo ipo": case("DPO", "pairs", loss_type=["ipo"]),
    "dpo llava": case("DPO", "pairs", "llava"),
    "dpo qwen3": case("DPO", "pairs", "qwen3_vl"),
    "kto": case("KTO", "labelled", per_device_train_batch_size=8),
}
# TRL also trains the model to predict the tokens that stand for images, where a whole conversation is trained on.
DIFFERENT = {"sft messages": case("SFT", "messages")}


def run(library: str, settings: dict[str, Any], folder: Path, epochs: int = 1) -> dict[str, list[float]]:
    """Loss and gradient norm of each step of a case."""
    module = importlib.import_module(library)
    config_class, trainer_class = (getattr(module, settings["trainer"] + end) for end in ("Config", "Trainer"))
    options = {
        "per_device_train_batch_size": 4, "num_train_epochs": epochs, "learning_rate": 0.02, "optim": "sgd",
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 0,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    model = vision_model(settings["model"])
    if settings["trainer"] != "SFT":  # TRL loads the reference by the model's name
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
    trainer = trainer_class(
        model=model,
        args=config_class(output_dir=str(folder / "out"), **options | settings["config"]),
        train_dataset=Dataset.from_list(rows(settings["rows"])),
        processing_class=processor(settings["model"]),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [float(step[name]) for step in steps] for name in ("loss", "grad_norm")}


def main() -> None:
    library, *names = sys.argv[1:]
    torch.set_num_threads(1)
    known = CASES | DIFFERENT
    for name in names or known:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps({"case": name, **run(library, known[name], Path(temporary))}), flush=True)


if __name__ == "__main__":
    main()
