"""An adapter from its training to a merged model, by config and by folder."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from made_runs import metrics_of, write_config, write_model
from upweight.cli.export.run import run_merge as run
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.run import train

LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4, "max_steps": 2, "learning_rate": 0.05}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    file = write_config(folder, write_model(folder / "model"), **LORA)
    train(load_config(file))
    return file


def test_by_config_and_by_folder(trained, tmp_path, capsys):
    out = trained.parent / "out"
    run(str(trained), [], output=None, check=True)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(out / "merged")
    assert "before and after, in float32" in printed[1]
    assert float(printed[1].split()[-1]) < 1e-3
    run(str(out), [], output=tmp_path / "again", check=False)
    (out / "config.yaml").rename(out / "config.aside")
    run(str(out), [f"base_model={trained.parent / 'model'}"], output=tmp_path / "alone", check=False)
    (out / "config.aside").rename(out / "config.yaml")
    models = [
        AutoModelForCausalLM.from_pretrained(place)
        for place in (out / "merged", tmp_path / "again", tmp_path / "alone")
    ]
    base = AutoModelForCausalLM.from_pretrained(trained.parent / "model")
    ids = torch.arange(5, 15).view(1, -1)
    with torch.no_grad():
        first, *others = (model(input_ids=ids).logits for model in (*models, base))
    assert torch.equal(first, others[0])
    assert torch.equal(first, others[1])
    assert not torch.allclose(first, others[2], atol=1e-3)


def test_nothing_to_merge(trained, tmp_path):
    with pytest.raises(UserError, match=r"whole model.*`upweight export` use it as it is"):
        run(str(trained.parent / "model"), [], output=None, check=False)
    run(str(trained), [], output=tmp_path / "merged", check=False)
    with pytest.raises(UserError, match="has this adapter in it already: use it as it is"):
        run(str(trained), [], output=tmp_path / "merged", check=False)
    with pytest.raises(UserError, match="holds no trained model"):
        run(str(trained), [f"output_dir={tmp_path}"], output=None, check=False)
    with pytest.raises(UserError, match="there is no such"):
        run("./nowhere.yaml", [], output=None, check=False)


def test_an_adapter_of_a_quantised_run_is_merged_into_the_weights_as_stored(trained, tmp_path):
    """`load_in_4bit` says how training holds the base; merging reads the files."""
    out = trained.parent / "out"
    content = json.loads(json.dumps({"base_model": str(trained.parent / "model")}))
    qlora = tmp_path / "qlora.yaml"
    keys = {**content, "rl": "dpo", "datasets": [{"path": "x.jsonl", "type": "chatml.intel"}], "adapter": "qlora",
            "load_in_4bit": True, "output_dir": str(out)}  # fmt: skip
    qlora.write_text(json.dumps(keys))
    run(str(qlora), [], output=tmp_path / "merged", check=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.float32


@pytest.mark.parametrize("keys", [{"adapter": "qlora", "load_in_4bit": True}, {"load_in_8bit": True}], ids=["4", "8"])
def test_training_on_quantised_weights_goes_on_and_merges(keys, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")  # `make test-quant`
    model = write_model(tmp_path / "model", num_hidden_layers=3, hidden_size=64, intermediate_size=128)
    keys = LORA | keys | {"learning_rate": 0.01, "num_epochs": 2, "max_steps": None, "warmup_steps": 0}
    for name, more in (("first", {}), ("second", {"lora_model_dir": str(tmp_path / "first" / "out")})):
        (tmp_path / name).mkdir()
        train(load_config(write_config(tmp_path / name, model, **keys, **more)))
        losses = [line["loss"] for line in metrics_of(tmp_path / name / "out") if "loss" in line]
        assert losses[0] == pytest.approx(0.693, abs=0.02)  # the second is compared with where the first ended
        assert losses[-1] < 0.2
    capsys.readouterr()
    run(str(tmp_path / "second" / "out"), [], output=None, check=True)
    assert float(capsys.readouterr().out.split()[-1]) < 1e-3


def test_a_place_that_is_not_there_is_named():
    with pytest.raises(UserError, match="nowhere: there is no such config, run or model folder"):
        run("nowhere", [], output=None, check=False)
