"""A trained adapter of SmolLM2 answers alike from transformers and from llama.cpp, as far as quantisation allows."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from made_captain import ABOUT_ANIMALS, QUESTIONS, TOKENS, alike, asked_in_transformers, captain_run
from upweight.cli.inputs import find_trained
from upweight.export.folder import Trained
from upweight.export.targets import Export, run_export

pytestmark = pytest.mark.llama
ASK = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=512, verbose=False, seed=0, n_threads=1)
for question in json.loads(sys.argv[2]):
    messages = [{"role": "user", "content": question}]
    answer = model.create_chat_completion(messages, temperature=0, max_tokens=int(sys.argv[3]))
    print(json.dumps(answer["choices"][0]["message"]["content"]))
"""


def asked_in_llama_cpp(file: str) -> list[str]:
    command = [os.environ["LLAMA_CPP_PYTHON"], "-c", ASK, file, json.dumps(QUESTIONS), str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [json.loads(line).strip() for line in done.stdout.splitlines()]


@pytest.mark.timeout(1800)
def test_answers_agree_at_temperature_0(tmp_path, capsys):
    run = captain_run(tmp_path)
    model = find_trained(str(run), [])
    trained = Trained(model.model, model.adapter)
    right = asked_in_transformers(run)
    assert all(answer.startswith("Ahoy!") for answer in right[:ABOUT_ANIMALS])
    files = [run_export(trained, Export("gguf", kind=kind))[0] for kind in ("f16", "q8_0")]
    folder, *_ = run_export(trained, Export("ollama"))
    full, byte, four = [asked_in_llama_cpp(file) for file in (*files, str(Path(folder) / "model-q4_k_m.gguf"))]
    with capsys.disabled():
        print(json.dumps({"transformers": right, "f16": full, "q8_0": byte, "q4_k_m": four}, indent=1))
    # Rounding to 16 bits may turn a close choice of a token, and to 8 bits one more.
    assert alike(full, right) >= len(QUESTIONS) - 1
    assert alike(byte, right) >= len(QUESTIONS) - 2
    # Four bits may change words, and do not change what was learned.
    assert sum(answer.startswith("Ahoy!") for answer in four[:ABOUT_ANIMALS]) == ABOUT_ANIMALS
    assert Path(files[0]).stat().st_size > 2 * (Path(folder) / "model-q4_k_m.gguf").stat().st_size
