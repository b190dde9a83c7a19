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

from parity_grpo import grpo, replaying
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
        elif kind in ("completions", "two images", "transparent"):
            row |= {"prompt": prompt, "completion": answer}
        elif kind == "prompts":
            row["prompt"] = prompt
        elif kind == "pairs":
            row |= {"prompt": prompt, "chosen": answer, "rejected": said("assistant", bad)}
        else:
            wanted = bool(number % 3)
            row |= {"prompt": prompt, "completion": said("assistant", good if wanted else bad), "label": wanted}
        if kind == "transparent":
            row["images"][0] = row["images"][0].convert("RGBA")
            row["images"][0].putalpha(drawn_image(number, *row["images"][0].size).convert("L"))
        made.append(row)
    return made


def case(trainer: str, kind: str, model: str = "qwen2_5_vl", **config: Any) -> dict[str, Any]:
    return {"trainer": trainer, "rows": kind, "model": model, "config": LARGEST | config}


def online(model: str = "qwen2_5_vl", **config: Any) -> dict[str, Any]:
    """A case of GRPO, whose completions are replayed; rollouts feed two steps, so that ratios leave 1."""
    made = grpo("sums", learning_rate=0.02, temperature=1.0, **config)
    return made | {"model": model}


CASES: dict[str, dict[str, Any]] = {
    "sft completions": case("SFT", "completions"),
    "sft two images": case("SFT", "two images", "llava"),  # Qwen needs tokens between two images
    "sft mistral3": case("SFT", "completions", "mistral3"),
    "sft gemma3": case("SFT", "completions", "gemma3"),
    "sft idefics3": case("SFT", "completions", "idefics3"),
    "sft smolvlm": case("SFT", "completions", "smolvlm"),
    "sft qwen2": case("SFT", "completions", "qwen2_vl"),
    "sft qwen3": case("SFT", "completions", "qwen3_vl"),
    "sft llava next": case("SFT", "two images", "llava_next"),
    "sft internvl": case("SFT", "completions", "internvl"),
    "sft transparent": case("SFT", "transparent", "llava"),
    "dpo": case("DPO", "pairs"),
    "dpo ipo": case("DPO", "pairs", loss_type=["ipo"]),
    "dpo llava": case("DPO", "pairs", "llava"),
    "dpo qwen3": case("DPO", "pairs", "qwen3_vl"),
    "dpo gemma3": case("DPO", "pairs", "gemma3"),
    "dpo mistral3": case("DPO", "pairs", "mistral3"),
    "dpo internvl": case("DPO", "pairs", "internvl"),
    "kto": case("KTO", "labelled", per_device_train_batch_size=8),
    "grpo": online(),
    "grpo llava next, beta": online("llava_next", beta=0.3),
    "grpo gemma3": online("gemma3"),
    "kto idefics3": case("KTO", "labelled", "idefics3", per_device_train_batch_size=8),
}
# TRL also trains the model to predict the tokens that stand for images, where a whole conversation is trained on.
DIFFERENT = {"sft messages": case("SFT", "messages")}


def replayed(settings: dict[str, Any], of_model: Any) -> dict[str, Any]:
    """The trainer's `rollout_func` and `reward_funcs`: prompts are what the processor makes of their images."""
    of_model.tokenizer.padding_side = "left"  # else TRL marks the wrong tokens as those of images
    arguments = replaying(settings, of_model.tokenizer.eos_token_id)
    of_texts = arguments["rollout_func"]

    def replay(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        options = {"tokenize": False, "add_generation_prompt": True}
        texts = [of_model.tokenizer.apply_chat_template(prompt, **options) for prompt in prompts]
        shown = [[part["image"] for part in prompt[0]["content"] if part["type"] == "image"] for prompt in prompts]
        ids = [
            list(of_model(text=[text], images=[several], add_special_tokens=False)["input_ids"][0])
            for text, several in zip(texts, shown, strict=True)
        ]
        return of_texts(texts, trainer) | {"prompt_ids": ids}

    return arguments | {"rollout_func": replay}


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
    of_model = processor(settings["model"])
    trainer = trainer_class(
        model=model,
        args=config_class(output_dir=str(folder / "out"), **options | settings["config"]),
        train_dataset=Dataset.from_list(rows(settings["rows"])),
        processing_class=of_model,
        **(replayed(settings, of_model) if settings["trainer"] == "GRPO" else {}),
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
