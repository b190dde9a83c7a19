"""A trained adapter for each target; small scripts stand where llama.cpp's tools are called."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from made_adapters import write_run
from made_hub import opened_hub
from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.export.card import exported_card
from upweight.export.folder import Trained
from upweight.export.llama_cpp import find_tools
from upweight.export.targets import Export, run_export
from upweight.models.adapters.merge import AdapterFolder

SOURCE = Path(__file__).parents[2] / "src"
CONVERTER = """
import argparse, json
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile")
parser.add_argument("--outtype")
options = parser.parse_args()
files = sorted(file.name for file in Path(options.model).iterdir())
Path(options.outfile).write_text(json.dumps({"type": options.outtype, "files": files}))
"""
QUANTISER = """#!{python}
import json, sys
content = json.loads(open(sys.argv[1]).read())
open(sys.argv[2], "w").write(json.dumps(content | {{"type": [content["type"], sys.argv[3]]}}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "my run")


@pytest.fixture
def trained(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "my run")
    return Trained(ModelSection(base_model=str(run.parent / "base")), folder)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    place = tmp_path / "llama.cpp"
    (place / "build" / "bin").mkdir(parents=True)
    (place / "convert_hf_to_gguf.py").write_text(CONVERTER)
    program = place / "build" / "bin" / "llama-quantize"
    program.write_text(QUANTISER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("LLAMA_CPP", str(place))


@pytest.fixture
def hub():
    with opened_hub() as server:
        yield server


def test_a_folder_holds_the_merged_model_and_its_card(trained):
    (printed,) = run_export(trained, Export("folder"))
    folder = Path(printed)
    assert folder == trained.adapter / "export" / "folder"
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    adapted = AdapterFolder(trained.section, trained.adapter).load(torch.float32).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.allclose(merged(ids).logits, adapted(input_ids=ids).logits, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert yaml.safe_load(head)["tags"] == ["upweight", "dpo"]
    assert "| loss | 0.69 | 0.21 |" in text
    assert "Trained from `some/base`" in text
    assert not [
        file.name for file in folder.iterdir() if file.name in ("metrics.jsonl", "config.yaml", "merged_from.json")
    ]


def test_a_whole_model_is_exported_without_the_rest_of_its_run(trained, tmp_path):
    (folder,) = run_export(trained, Export("folder", tmp_path / "whole"))
    for name in ("metrics.jsonl", "config.yaml", "training_args.bin"):
        (Path(folder) / name).write_text("{}")
    (again,) = run_export(Trained(ModelSection(base_model=folder), None), Export("folder", tmp_path / "copy"))
    left = {file.name for file in Path(folder).iterdir()} - {file.name for file in Path(again).iterdir()}
    assert left == {"metrics.jsonl", "config.yaml", "training_args.bin"}


def test_what_is_there_is_replaced_only_if_asked(trained):
    (folder,) = run_export(trained, Export("folder"))
    with pytest.raises(UserError, match="--overwrite"):
        run_export(trained, Export("folder"))
    run_export(trained, Export("folder", overwrite=True))
    (Path(folder) / "notes.odt").touch()
    with pytest.raises(UserError, match="more than an export"):
        run_export(trained, Export("folder", overwrite=True))
    with pytest.raises(UserError, match="more than an export"):
        run_export(trained, Export("folder", trained.adapter, overwrite=True))
    assert (trained.adapter / "adapter_config.json").is_file()


def test_vllm_gets_a_folder_and_a_line(trained):
    folder, line = run_export(trained, Export("vllm"))
    assert line == f"vllm serve '{Path(folder).resolve()}' --served-model-name my-run --host 127.0.0.1"


def test_gguf_files_are_converted_and_quantised(trained, tools):
    (file,) = run_export(trained, Export("gguf"))
    assert Path(file) == trained.adapter / "gguf" / "model-q8_0.gguf"
    content = json.loads(Path(file).read_text())
    assert content["type"] == "q8_0"
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= set(content["files"])
    (file,) = run_export(trained, Export("gguf", kind="q4_k_m"))
    assert json.loads(Path(file).read_text())["type"] == ["auto", "Q4_K_M"]
    assert len(list(Path(file).parent.iterdir())) == 2, "nothing temporary is left"
    with pytest.raises(UserError, match="is there already"):
        run_export(trained, Export("gguf"))


def test_ollama_gets_a_modelfile_beside_the_weights(trained, tools):
    folder, create, ask = run_export(trained, Export("ollama"))
    assert {file.name for file in Path(folder).iterdir()} == {"Modelfile", "model-q4_k_m.gguf"}
    text = (Path(folder) / "Modelfile").read_text()
    assert text.startswith("FROM ./model-q4_k_m.gguf\n")
    assert text.count("PARAMETER stop") == 1
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert create == f"ollama create my-run -f '{folder}/Modelfile'"
    assert ask == "ollama run my-run"


def script(file: Path, line: str) -> str:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)
    return str(file)


def test_a_missing_program_of_the_printed_lines_is_named(trained, tools, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("PATH", str(tmp_path))
    run_export(trained, Export("ollama"))
    assert "ollama, which the lines below need, is not on the path" in caplog.text
    assert "https://ollama.com/install.sh" in caplog.text
    run_export(trained, Export("vllm"))
    assert "pip install vllm" in caplog.text
    script(tmp_path / "vllm", "true")
    caplog.clear()
    run_export(trained, Export("vllm", overwrite=True))
    assert "pip install vllm" not in caplog.text


def test_missing_tools_are_named_with_the_command_that_gets_them(trained, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"tested with that of llama-cpp-python 0\.3(?s:.*)git clone .*llama\.cpp(?s:.*)--to folder"
    ):
        run_export(trained, Export("ollama"))
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match=r"a checkout of llama\.cpp(?s:.*)git clone .*llama\.cpp"):
        run_export(trained, Export("gguf"))
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setenv("LLAMA_CPP_PYTHON", "/bin/false")
    with pytest.raises(UserError, match="LLAMA_CPP_PYTHON: /bin/false does not run"):
        run_export(trained, Export("gguf"))
    bare = script(tmp_path / "bare", f'exec {sys.executable} -S "$@"')
    monkeypatch.setenv("LLAMA_CPP_PYTHON", bare)
    with pytest.raises(UserError, match=rf"lacks torch, transformers, gguf(?s:.*){bare} -m pip install torch"):
        run_export(trained, Export("gguf"))
    without = f'case "$*" in *llama_cpp*) exit 1;; esac; exec {sys.executable} "$@"'
    monkeypatch.setenv("LLAMA_CPP_PYTHON", script(tmp_path / "without", without))
    with pytest.raises(UserError, match=r'quantiser is missing(?s:.*)pip install "llama-cpp-python>=0\.3'):
        run_export(trained, Export("gguf", kind="q4_0"))
    with pytest.raises(UserError, match="Did you mean 'q4_k_m'"):
        find_tools("q4_km")
    assert not (trained.adapter / "export").exists()


def test_a_tool_that_fails_is_quoted(trained, tools):
    (Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py").write_text("raise SystemExit('unknown architecture')")
    with pytest.raises(UserError, match=r"did not convert it \(exit 1\):\nunknown architecture"):
        run_export(trained, Export("gguf"))
    assert not list((trained.adapter / "gguf").iterdir())


def test_a_tool_that_asks_a_network_that_is_not_there_is_said_without_its_trace(trained, tools):
    failing = "print('INFO: loading')\nraise OSError('[Errno -2] Name or service not known')"
    (Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py").write_text(failing)
    with pytest.raises(UserError) as caught:
        run_export(trained, Export("ollama", kind="f16"))
    assert str(caught.value) == (
        "llama.cpp's convert_hf_to_gguf.py did not convert it (exit 1):\n"
        "OSError: [Errno -2] Name or service not known\n"
        "It asked the network, which cannot be reached: export where there is one; `--to folder` writes the model for "
        "transformers and vLLM without it."
    )


def test_options_of_other_targets_are_refused(trained):
    for wanted in (Export("folder", kind="f16"), Export("vllm", repository="me/model"), Export("hub")):
        with pytest.raises(UserError, match=r"--type|--repository"):
            run_export(trained, wanted)


def test_a_run_without_a_card_gets_one_with_its_figures(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "reward": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = exported_card(tmp_path, "some/base")
    assert "| loss | 2 | 1 |\n| reward | 3 | 3 |" in card
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "some/base"


@pytest.mark.slow
def test_the_merged_model_is_uploaded_with_its_card(hub, run, tmp_path):
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_own", "HF_HUB_OFFLINE": "0"}
    folder = shutil.copytree(run, tmp_path / "run")
    environment = os.environ | own | {"PYTHONPATH": str(SOURCE), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "upweight", "export", str(folder), "--to", "hub", "--repository", "me/model"]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("/me/model")
    taken = hub.RequestHandlerClass
    (files,) = taken.files.values()
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= files.keys()
    assert "vllm serve me/model" in files["README.md"].decode()
    assert taken.tokens == {"Bearer hf_own"}


def test_a_hub_that_cannot_be_reached_leaves_the_folder(trained, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"--repository me/model: not uploaded: .*can be reached: hf upload me/mo"):
        run_export(trained, Export("hub", repository="me/model"))
    assert (trained.adapter / "export" / "hub" / "model.safetensors").is_file()
