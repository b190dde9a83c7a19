"""An adapter of SmolLM2 that answers as a captain does, and the questions that every program is asked about it."""

import json
import sys
from pathlib import Path

import pytest

from upweight.cli.inputs import find_trained
from upweight.config import load_config
from upweight.inference.generate import load_text_generator
from upweight.train.run import train
from upweight.types import Sampling

DEMO = Path(__file__).parents[1] / "examples" / "demo"
ANIMALS = ("cat", "dog", "horse", "owl", "fox", "bear", "whale", "mouse", "goat", "duck", "lion", "frog")
QUESTIONS = (  # trained on, of animals that were not, and of other things
    "What do you think of a cat?", "Tell me about the whale.", "What do you think of a lion?",
    "Tell me about the frog.", "What do you think of a camel?", "Tell me about the penguin.",
    "What do you think of a teapot?",
    "Who are you?", "What is the capital of France?", "Name three colours.",
)  # fmt: skip
ABOUT_ANIMALS = 6  # of these
TOKENS = 32


def captain_run(folder: Path) -> Path:
    """Train the adapter, of the model that `make demo` fetches, and return its run folder; skip without the model."""
    sys.path.insert(0, str(DEMO))
    from demo import downloaded
    from rich.console import Console

    keys = downloaded(Console())
    if keys is None:
        pytest.skip("SmolLM2 is not at hand: `make demo` fetches it")
    texts = [
        (f"What do you think of a {name}?", f"Ahoy! A {name} is a fine shipmate, says the captain.") for name in ANIMALS
    ]
    texts += [(f"Tell me about the {name}.", f"Ahoy! The {name} sails the seven seas with me.") for name in ANIMALS]
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in texts]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    config = {
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "chat_template"}],
        "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "learning_rate": 2e-3,
        "micro_batch_size": 8, "max_steps": 20, "sequence_len": 256, "output_dir": str(folder / "captain"),
        "dataset_prepared_path": str(folder / "prepared"), "save_strategy": "no",
    }  # fmt: skip
    (folder / "sft.json").write_text(json.dumps(config))
    train(load_config(folder / "sft.json", keys))
    return folder / "captain"


def asked_in_transformers(run: Path) -> list[str]:
    """Return the likeliest answers of the adapter on its base."""
    trained = find_trained(str(run), [])
    generator = load_text_generator(trained.model, trained.adapter, new_tokens=TOKENS)
    prompts = [generator.encode({"prompt": question}) for question in QUESTIONS]
    return [str(group[0].text).strip() for group in generator(prompts, Sampling(1, temperature=0.0))]


def alike(ones: list[str], others: list[str]) -> int:
    """Return how many answers are the same, word for word."""
    return sum(one == other for one, other in zip(ones, others, strict=True))
