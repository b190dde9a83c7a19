"""A trained adapter served by a real vLLM: on its base, and merged; both answer as transformers do."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

import made_captain
from made_adapters import write_run
from made_runs import write_model
from upweight.cli.inputs import find_trained
from upweight.export.folder import Trained
from upweight.export.targets import Export, run_export
from upweight.inference.generate import load_text_generator
from upweight.processes import free_port
from upweight.types import Sampling
from with_vllm.real_server import ON_CPU, OPTIONS, PYTHON, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
QUESTIONS = ("hello", "the quick brown fox", "say something")


@contextmanager
def served(folder: Path):
    """The address of `upweight serve FOLDER --backend vllm`."""
    port = free_port()
    command = [sys.executable, "-m", "upweight", "serve", str(folder), "--backend", "vllm", "--port", str(port)]
    environment = os.environ | ON_CPU | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [*command, *OPTIONS, "--python", PYTHON], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        ready = f"http://127.0.0.1:{port}/v1"  # among the lines of vLLM
        assert any(line.startswith(ready) for line in process.stdout)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def asked(address: str, model: str, questions: Sequence[str] = QUESTIONS, tokens: int = 8) -> list[str]:
    texts = []
    for question in questions:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
        answer = httpx.post(
            f"{address}/v1/chat/completions", json={**body, "max_tokens": tokens}, timeout=300, trust_env=False
        )
        # vLLM leaves out a character that is cut at the end; transformers writes the sign for a broken one.
        texts.append(answer.json()["choices"][0]["message"]["content"].rstrip("\ufffd"))
    return texts


def in_transformers(section, adapter) -> list[str]:
    generator = load_text_generator(section, adapter, new_tokens=8)
    prompts = [generator.encode({"prompt": question}) for question in QUESTIONS]
    return [str(group[0].text).rstrip("\ufffd") for group in generator(prompts, Sampling(1, temperature=0.0))]


def test_vllm_answers_as_transformers_do(tmp_path):
    base = write_model(tmp_path / "base", **SIZES)
    run = write_run(tmp_path / "mine", base)
    AutoTokenizer.from_pretrained(run).save_pretrained(base)  # vLLM asks both with the template of the run
    trained = find_trained(str(run), [])
    right, before = in_transformers(trained.model, trained.adapter), in_transformers(trained.model, None)
    assert right != before
    with served(run) as address:
        assert asked(address, "mine") == right
        assert asked(address, "base") == before
    folder, line = run_export(Trained(trained.model, trained.adapter), Export("vllm"))
    assert line.startswith("vllm serve ")
    with served(Path(folder)) as address:
        assert asked(address, "mine") == right


@pytest.mark.timeout(1800)
def test_an_adapter_of_smollm2_answers_alike_from_vllm(tmp_path, capsys):
    run = made_captain.captain_run(tmp_path)
    trained = find_trained(str(run), [])
    right = made_captain.asked_in_transformers(run)
    folder, _ = run_export(Trained(trained.model, trained.adapter), Export("vllm"))
    with served(Path(folder)) as address:
        answers = asked(address, "captain", made_captain.QUESTIONS, made_captain.TOKENS)
    answers = [answer.strip() for answer in answers]
    with capsys.disabled():
        print(json.dumps({"transformers": right, "vllm": answers}, indent=1))
    # The merged weights are rounded to the precision of the base, which may turn a close choice of a token.
    assert made_captain.alike(answers, right) >= len(made_captain.QUESTIONS) - 1
