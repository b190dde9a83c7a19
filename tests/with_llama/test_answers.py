"""A trained adapter of SmolLM2 answers alike from transformers and from llama.cpp, as far as quantisation allows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from upweight.cli.inputs import find_trained
from upweight.config import load_config
from upweight.export.folder import Trained
from upweight.export.targets import Export, run_export
from upweight.inference.generate import load_text_generator
from upweight.train.run import train
from upweight.types import Sampling

pytestmark = pytest.mark.llama
DEMO = Path(__file__).parents[2] / "examples" / "demo"
ANIMALS = ["cat", "dog", "horse", "owl", "fox", "bear", "whale", "mouse", "goat", "duck", "lion", "frog"]
QUESTIONS = ["What do you think of a cat?", "Tell me about the whale.", "What do you think of a camel?", "Who are you?"]
ASK = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=512, verbose=False, seed=0, n_threads=1)
for question in json.loads(sys.argv[2]):
    answer = model.create_chat_completion([{"role": "user", "content": question}], temperature=0, max_tokens=24)
    print(json.dumps(answer["choices"][0]["message"]["content"]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An adapter of SmolLM2 that answers as a captain does; the model is that of `make demo`."""
    sys.path.insert(0, str(DEMO))
    from demo import downloaded
    from rich.console import Console

    keys = downloaded(Console())
    if keys is None:
        pytest.skip("SmolLM2 is not at hand: `make demo` fetches it")
    folder = tmp_path_factory.mktemp("captain")
    texts = [
        (f"What do you think of a {name}?", f"Ahoy! A {name} is a fine shipmate, says the captain.") for name in ANIMALS
    ]
    texts += [(f"Tell me about the {name}.", f"Ahoy! The {name} sails the seven seas with me.") for name in ANIMALS]
    turns = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in texts]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    config = {
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "chat_template"}],
        "adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, "learning_rate": 2e-3,
        "micro_batch_size": 8, "max_steps": 20, "sequence_len": 256, "output_dir": str(folder / "run"),
        "dataset_prepared_path": str(folder / "prepared"),
    }  # fmt: skip
    (folder / "sft.json").write_text(json.dumps(config))
    train(load_config(folder / "sft.json", keys))
    return folder / "run"


def asked_in_transformers(run: Path) -> list[str]:
    model = find_trained(str(run), [])
    generator = load_text_generator(model.model, model.adapter, new_tokens=24)
    prompts = [generator.encode({"prompt": question}) for question in QUESTIONS]
    return [str(group[0].text).strip() for group in generator(prompts, Sampling(1, temperature=0.0))]


def asked_in_llama_cpp(file: str) -> list[str]:
    command = [os.environ["LLAMA_CPP_PYTHON"], "-c", ASK, file, json.dumps(QUESTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [json.loads(line).strip() for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800)
def test_answers_agree_at_temperature_0(run, capsys):
    model = find_trained(str(run), [])
    trained = Trained(model.model, model.adapter)
    right = asked_in_transformers(run)
    assert all("captain" in answer or "Ahoy" in answer for answer in right[:3])
    (full,) = run_export(trained, Export("gguf", kind="f16"))
    half = asked_in_llama_cpp(full)
    # Rounding to 16 bits may turn one close choice of a token.
    assert sum(one == other for one, other in zip(half, right, strict=True)) >= len(QUESTIONS) - 1
    folder, *_ = run_export(trained, Export("ollama", kind="q4_k_m"))
    four = asked_in_llama_cpp(str(Path(folder) / "model-q4_k_m.gguf"))
    assert Path(full).stat().st_size > 2 * (Path(folder) / "model-q4_k_m.gguf").stat().st_size
    # Four bits may change words, and do not change what was learned.
    assert sum(answer.startswith("Ahoy!") for answer in four[:3]) == 3
    with capsys.disabled():
        print(json.dumps({"transformers": right, "f16": half, "q4_k_m": four}, indent=1))
