"""A trained model as a GGUF file; a small converter stands where llama.cpp's is called."""

from pathlib import Path

import pytest
import torch

from made_runs import write_config, write_model
from upweight.cli.export.run import run_merge as merge
from upweight.cli.export.run import run_to_target
from upweight.config import load_config
from upweight.config.sections.model import ModelSection
from upweight.errors import UserError
from upweight.export.targets import Export
from upweight.models.load import load_model
from upweight.train.run import train

CONVERTER = """
import argparse, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from transformers import AutoModelForCausalLM
from made_gguf import write_gguf
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--outfile")
parser.add_argument("--outtype", choices=["f32"])
options = parser.parse_args()
write_gguf(AutoModelForCausalLM.from_pretrained(options.model), Path(options.outfile))
"""


def run(place: str, kind: str) -> None:
    run_to_target(place, [], Export("gguf", kind=kind))


@pytest.fixture
def converter(tmp_path, monkeypatch):
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER.format(tests=str(Path(__file__).parents[1])))
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))


@pytest.mark.slow
def test_an_adapter_is_merged_and_converted(converter, tmp_path, capsys):
    pytest.importorskip("gguf")
    model = write_model(tmp_path / "model", tie_word_embeddings=False)
    keys = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4, "learning_rate": 0.05, "max_steps": 2}
    train(load_config(write_config(tmp_path, model, **keys)))
    out = tmp_path / "out"
    run(str(out), "f32")
    file = out / "gguf" / "model-f32.gguf"
    assert capsys.readouterr().out == f"{file}\n"
    merge(str(out), [], output=None, check=False)
    merged, read = (
        load_model(ModelSection(base_model=str(place)), torch.float32).state_dict() for place in (out / "merged", file)
    )
    turned = ("q_proj.weight", "k_proj.weight")  # the file's order of their rows is another
    assert all(torch.equal(read[name], weight) for name, weight in merged.items() if not name.endswith(turned))
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(UserError, match="is there already"):
        run(str(out), "f32")
    with pytest.raises(UserError, match=r"did not convert it \(exit 2\)"):
        run(str(out / "merged"), "f16")
    assert not list((out / "merged" / "gguf").iterdir())


def test_the_converter_has_to_be_there(tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="set LLAMA_CPP to its folder"):
        run("some/thing", "f16")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match=r"a checkout of llama\.cpp"):
        run("some/thing", "f16")
