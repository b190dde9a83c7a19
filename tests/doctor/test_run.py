"""The doctor on run folders: sick runs are made on purpose, or recorded, and named with evidence and remedy."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from made_health import HEALTHY, SICK, learning, run_of
from made_runs import write_online
from slow_cases import slow_except
from upweight.config import load_config
from upweight.doctor.run import check_run
from upweight.errors import UserError
from upweight.runs.checkpoints import mark_whole
from upweight.runs.files import this_machine
from upweight.train.run import train

EMPTY_HANDED = """
import torch

def nothing(completions, **kwargs):
    return [0.5] * len(completions)

def too_much(prompts, trainer):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
"""
# the verdict of a tiny run, what it trains with, and a key that the remedy names
MADE = {
    "no signal": ({"max_steps": 20}, {"reward_funcs": ["sick.nothing"]}, "/out/config.yaml`"),
    "truncated": ({"max_steps": 10}, {"max_completion_length": 2}, "trl.max_completion_length"),
    "mode collapse": ({"max_steps": 10, "learning_rate": 1e-9}, {"temperature": 0.00001}, "trl.temperature"),
    "kl explosion": ({"max_steps": 8, "learning_rate": 3.0}, {"beta": 0.001}, "trl.beta"),
}


def recorded(folder, rows, **record):
    """A run folder with these metrics."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if record:
        (folder / "run.json").write_text(json.dumps(record))
    return folder


def wrong(folder):
    return {one.what: one for one in check_run(folder) if one.wrong}


def online(tmp_path, model_folder, keys, trl):
    (tmp_path / "sick.py").write_text(EMPTY_HANDED)
    file = write_online(tmp_path, model_folder, **keys)
    return load_config(file, [f"trl.{key}={json.dumps(value)}" for key, value in trl.items()])


def test_a_young_run_is_not_called_well(tmp_path):
    rows = run_of({**HEALTHY, "reward": 0.0, "frac_reward_zero_std": 1.0}, steps=8)
    *_, finding = check_run(recorded(tmp_path, rows, state="done", max_steps=8))
    assert (finding.level, finding.what) == ("note", "too early")
    assert finding.says.startswith("after 8 steps, ")
    assert "rules judge later: '" in finding.says
    assert len(finding.says) < 120
    assert {one["name"]: one["step"] for one in finding.evidence["waiting"]}["no signal"] == 20
    recorded(tmp_path, run_of({**HEALTHY, "reward": learning}))
    assert [one.what for one in check_run(tmp_path) if one.level == "ok"][-1] == "health"


def test_remedies_name_the_config_of_the_run_as_it_is_typed(tmp_path):
    _, usual, then = next(case for case in SICK if case[0] == "no signal")
    sick = recorded(tmp_path, run_of(usual, then))
    assert "`upweight rewards CONFIG`" in wrong(sick)["no signal"].remedy
    (sick / "config.yaml").touch()
    assert f"`upweight rewards {tmp_path}/config.yaml`" in wrong(sick)["no signal"].remedy


def test_a_remedy_names_the_checkpoint_from_before_the_verdict(tmp_path):
    _, usual, then = next(case for case in SICK if case[0] == "kl explosion")  # from step 21 on
    sick = recorded(tmp_path, run_of(usual, then))
    assert "before kl rose (none of before is left)" in wrong(sick)["kl explosion"].remedy
    for step in (10, 20, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"x")
        mark_whole(tmp_path / f"checkpoint-{step}")
    assert f"(`resume_from_checkpoint={tmp_path}/checkpoint-20`)" in wrong(sick)["kl explosion"].remedy


@pytest.mark.parametrize("name", slow_except(["truncated"], MADE))
def test_a_run_that_is_made_sick_is_named(name, model_folder, tmp_path):
    keys, trl, remedy = MADE[name]
    train(online(tmp_path, model_folder, keys, trl))
    found = wrong(tmp_path / "out")[name]
    assert remedy in found.remedy
    assert found.evidence["step"] <= keys["max_steps"]
    assert {"metric", "value", "threshold"} <= found.evidence.keys()


def test_a_learning_rate_far_from_the_usual_is_named_after_the_run_too(tmp_path):
    rows = run_of({**HEALTHY, "reward": learning})
    (tmp_path / "config.yaml").write_text("base_model: x\nrl: dpo\nlearning_rate: 0.1\ndatasets: [{path: x}]\n")
    assert wrong(recorded(tmp_path, rows, state="done", max_steps=300))["keys"].says.startswith(
        "learning_rate: 0.1 is far"
    )
    (tmp_path / "config.yaml").write_text("rl: dpo\nlearning_rate: 1e-6\n")
    assert not wrong(tmp_path)
    (tmp_path / "config.yaml").write_text("rl: nowhere.Method\n")
    assert not wrong(tmp_path)


def test_a_run_out_of_memory_gets_the_ladder(model_folder, tmp_path):
    config = online(tmp_path, model_folder, {}, {"rollout_func": "sick.too_much"})
    with pytest.raises(UserError, match="out of GPU memory"):
        train(config)
    found = wrong(tmp_path / "out")["out of memory"]
    assert "failed at step 0 of 2" in found.says
    assert (
        found.remedy.index("token_budget") < found.remedy.index("gradient_checkpointing") < found.remedy.index("fsdp")
    )


@pytest.mark.parametrize(
    ("name", "healthy", "sick"),
    [
        pytest.param(*one, id=f"{one[0]} {number}", marks=[pytest.mark.slow] if number % 4 else [])
        for number, one in enumerate(SICK)
    ],
)
def test_every_sickness_that_is_recorded_is_named(name, healthy, sick, tmp_path):
    healthy = {**healthy, "reward": learning} if name not in ("flat reward", "reward at zero") else healthy
    found = wrong(recorded(tmp_path, run_of(healthy, sick), state="done", max_steps=300))
    assert name in found
    assert found[name].remedy
    assert str(found[name].evidence["step"]) in found[name].says


def test_how_a_run_ended_is_said(tmp_path, monkeypatch):
    rows = run_of({**HEALTHY, "reward": learning}, steps=30)

    def said(**record):
        found = check_run(recorded(tmp_path, rows, max_steps=90, **record))
        return found[0].level, found[0].says, found[0].remedy

    here = {"state": "running", "machine": this_machine()}
    assert said(state="done") == ("ok", "finished at step 30 of 90", "")
    assert said(**here, pid=os.getpid()) == ("ok", "is running, at step 30 of 90", "")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    level, says, remedy = said(**here, pid=gone.pid)
    assert (level, says) == ("alarm", "was ended from outside at step 30 of 90")
    assert "-9" in remedy
    assert "; then start again: there is no whole checkpoint" in remedy
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
    level, says, remedy = said(**here, pid=gone.pid)
    assert says == "ended at step 30 of 90 and could not record why"
    assert "its disk is full (3 MiB free): make room; start again: there is no whole checkpoint" in remedy
    level, says, remedy = said(state="stopped")
    assert (level, says) == ("warning", "was stopped at step 30 of 90")
    assert "no whole checkpoint" in remedy
    assert check_run(recorded(tmp_path, [], state="failed", message="no"))[0].remedy == (
        "correct the cause; start again with `upweight train CONFIG`"
    )
    assert said(state="failed", message="loss is nan")[1] == "failed at step 30 of 90: loss is nan"
    assert said(state="running", machine="elsewhere", pid=1)[0] == "note"


def test_a_cut_off_line_and_an_empty_run_are_lived_through(tmp_path):
    recorded(tmp_path, run_of({**HEALTHY, "reward": learning}, steps=5), state="done")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stop": 6, "loss": 1.0}\n{"step": 6, "lo')
    assert not wrong(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert set(wrong(recorded(empty, [], state="failed", message="no"))) == {"run"}
    assert set(wrong(recorded(empty, [], state="done"))) == {"metrics"}


def test_a_damaged_checkpoint_is_named_however_the_run_ended(tmp_path):
    for step in (4, 8):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"x" * 50)
        mark_whole(checkpoint)
    rows = run_of({**HEALTHY, "reward": learning}, steps=9)
    assert not wrong(recorded(tmp_path, rows, state="done"))
    (tmp_path / "checkpoint-8" / "model.safetensors").write_bytes(b"x" * 49 + b"y")
    for state in ("done", "stopped"):
        found = wrong(recorded(tmp_path, rows, state=state))
        assert found["checkpoint"].says == (
            "checkpoint-8 is damaged: model.safetensors holds other bytes than were written"
        )
        assert found["checkpoint"].remedy.startswith(f"`rm -r {tmp_path / 'checkpoint-8'}` removes it")
    assert "go on from step 4" in found["run"].remedy


def test_a_checkpoint_that_is_being_written_is_not_damaged(tmp_path):
    (tmp_path / "checkpoint-8").mkdir()
    rows = run_of({**HEALTHY, "reward": learning}, steps=9)
    running = {"state": "running", "machine": this_machine(), "pid": os.getpid()}
    assert not wrong(recorded(tmp_path, rows, **running))


def test_stages_are_told_apart_and_other_folders_refused(tmp_path):
    stage = tmp_path / "stage-1-prefer"
    stage.mkdir()
    (stage / "config.yaml").write_text("rl: dpo\n")
    recorded(stage, run_of({"loss": 1.0, "grad_norm": 900.0}, steps=40), state="done")
    assert set(wrong(tmp_path)) == {"stage-1-prefer: large gradients"}
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with pytest.raises(UserError, match="neither a config nor the folder of a run"):
        check_run(nothing)
