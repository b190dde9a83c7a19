"""Stages from a config to one report; a stopped run goes on where it was."""

import json

import pytest
import torch
from safetensors.torch import load_file

from made_runs import metrics_of, write_config
from upweight.cli.train import Start, run_train
from upweight.config import load_config
from upweight.train.stages import DONE, train_stages

LORA = {"adapter": "lora", "lora_target_linear": True, "lora_r": 4}


def config_of(folder, model_folder, second=None, **keys):
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"the quick fox {n}"}) + "\n" for n in range(8)))
    sft = {"name": "imitate", "datasets": [{"path": str(texts), "type": "completion", "field": "text"}], "max_steps": 3}
    dpo = {"rl": "dpo", "max_steps": 2, **(second or {})}
    return write_config(folder, model_folder, rl=None, num_epochs=None, stages=[sft, dpo], rl_beta=0.3, **keys)


def run(file, resume=False):
    run_train(file, [], resume=resume, start=Start(None), stage=None, quiet=False, as_json=False)


def weights(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {}), (LORA, {}), (LORA, {"adapter": None, "lora_r": None, "lora_target_linear": None}), ({}, LORA)],
)
def test_each_stage_goes_on_from_the_one_before(model_folder, tmp_path, first, second, caplog):
    caplog.set_level("INFO", "upweight")
    run(config_of(tmp_path, model_folder, second, **first))
    out = tmp_path / "out"
    one, two = out / "stage-1-imitate", out / "stage-2-dpo"
    begun = metrics_of(two)[0]
    assert begun["loss"] == pytest.approx(0.6931, abs=1e-3)  # the reference is where this stage began
    assert len(metrics_of(one)) == 3
    before, after = weights(one), weights(two)
    if before.keys() == after.keys():
        changed = max(float((before[name] - after[name]).abs().max()) for name in before)
        assert 0 < changed < 0.1
    report = (out / "stages.md").read_text()
    assert "| stage-1-imitate | sft | 3 | loss |" in report
    assert "| stage-2-dpo | dpo | 2 | loss | 0.6931 |" in report
    assert "The result is in `stage-2-dpo`" in report


def test_a_resumed_run_passes_over_what_is_done(model_folder, tmp_path):
    file = config_of(tmp_path, model_folder)
    run(file)
    one, two = tmp_path / "out" / "stage-1-imitate", tmp_path / "out" / "stage-2-dpo"
    right = weights(two)
    (two / DONE).unlink()
    written = (one / "model.safetensors").stat().st_mtime_ns
    run(file, resume=True)
    assert (one / "model.safetensors").stat().st_mtime_ns == written
    assert all(torch.equal(value, right[name]) for name, value in weights(two).items())
    done = []
    train_stages(load_config(file), lambda number, again: done.append((number, again)), resume=True)
    assert done == []
    (one / DONE).unlink()
    train_stages(load_config(file), lambda number, again: done.append((number, again)), resume=True)
    assert done == [(0, True), (1, False)]
    train_stages(load_config(file), lambda number, again: done.append((number, again)))
    assert done[2:] == [(0, False), (1, False)]


@pytest.mark.slow
def test_two_processes_train_the_stages_that_one_trains(model_folder, tmp_path):
    found = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        file = config_of(folder, model_folder, micro_batch_size=2 // count)
        if count == 1:
            run(file)
        else:
            run_train(file, [], resume=False, start=Start(2), stage=None, quiet=False, as_json=False)
        found.append(metrics_of(folder / "out" / "stage-2-dpo"))
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)
