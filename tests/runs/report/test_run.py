"""A run folder as the page sees it."""

import json
import os
import subprocess
import sys

import pytest

from made_reports import CONFIG, metrics, write_run
from upweight.doctor.run import check_run
from upweight.runs.checkpoints import mark_whole
from upweight.runs.files import this_machine
from upweight.runs.report.page import PageReader
from upweight.runs.report.run import RunReader, folders_of
from upweight.runs.report.text import text_page


def read(folder):
    return RunReader(folder).read("it")


def test_a_finished_run(tmp_path):
    run = read(write_run(tmp_path / "run", record={"state": "done", "started": 1e9, "rows": 1234, "max_steps": 10}))
    assert (run["state"], run["step"], run["max_steps"], run["method"], run["online"]) == ("done", 10, 10, "GRPO", True)
    assert run["metrics"]["reward"][0] == 0.01
    assert run["health"][0]["name"] == "kl explosion"
    facts = dict(run["facts"])
    assert facts["Rewards"] == "2 \u00d7 rewards.correct, 0.5 \u00d7 length"
    assert facts["Rows"] == "1,234"
    assert facts["Batch"] == "8 \u00d7 2 accumulated"
    assert run["completions"][0]["rows"][0]["reward"] == 2.0
    (held_out,) = run["held_out"]
    assert held_out["lines"][0] == {"metric": "reward", "before": 0.1, "after": 10.1, "first": 0, "last": 10}


def test_verdicts_on_the_start_are_left_out_where_a_later_one_says_more(tmp_path):
    folder = write_run(tmp_path / "run")
    found = [{"name": name, "level": "alarm", "step": 4} for name in ("no signal so far", "no signal", "truncated")]
    (folder / "health.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    assert [one["name"] for one in read(folder)["health"]] == ["no signal", "truncated"]


def test_secrets_stay_out_of_the_page(tmp_path):
    run = read(write_run(tmp_path / "run"))
    assert "s3cret" not in str(run)
    assert run["settings"]["wandb_api_key"] == "(hidden)"
    assert run["settings"]["trl.num_generations"] == "2"


def test_how_a_run_stands(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = {"state": "running", "machine": this_machine()}
    cases = {
        "killed": {**here, "pid": gone.pid},
        "running": {**here, "pid": os.getpid()},
        "failed": {"state": "failed", "message": "step 3: loss is nan"},
        "recorded": {"state": "of another program"},
    }
    for state, record in cases.items():
        run = read(write_run(tmp_path / state, record=record))
        assert (run["state"], run["message"]) == (state, record.get("message"))
    elsewhere = {"state": "running", "machine": "another", "pid": gone.pid}
    assert read(write_run(tmp_path / "elsewhere", record=elsewhere))["state"] == "running"


def test_the_page_says_how_a_run_goes_on(tmp_path):
    command = "upweight train my.yaml --resume"
    rows = [metrics(step) for step in range(1, 9)]

    def said(name, logged=rows, checkpoint=None, **record):
        folder = write_run(tmp_path / name, rows=rows, record={"command": command, **record})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
        if checkpoint:
            (folder / f"checkpoint-{checkpoint}").mkdir()
            (folder / f"checkpoint-{checkpoint}" / "model.safetensors").write_bytes(b"x")
            mark_whole(folder / f"checkpoint-{checkpoint}")
        advice = read(folder)["advice"]
        assert advice in check_run(folder)[0].remedy
        assert advice[1:] in " ".join(text_page(PageReader([folder]).read(), 100).split())
        return advice

    failed = {"state": "failed", "message": "step 8: loss is nan"}
    onward = f"go on from step 5 with `{command}`"
    assert said("failed", checkpoint=5, **failed) == onward
    assert said("stopped", checkpoint=5, state="stopped") == onward
    assert said("without", **failed).startswith("start again: there is no whole checkpoint")
    assert said("at-once", logged=[], **failed) == "start again with `upweight train my.yaml`"
    assert said("script", logged=[], state="failed", message="no", settings={}, command=None) == "start again"
    assert said("done", state="done") == ""
    assert said("known", checkpoint=5, state="failed", message=f"the disk is full. Mend it and {onward}.") == ""


def test_keys_of_two_runs_are_compared_one_by_one_as_yaml_writes_them(tmp_path):
    config = {**CONFIG, "datasets": [{"path": "rows.jsonl", "shuffle": True}], "seed": None}
    settings = read(write_run(tmp_path / "run", config=config))["settings"]
    assert settings["datasets.0.path"] == "rows.jsonl"
    assert settings["datasets.0.shuffle"] == "true"
    assert settings["seed"] == "null"


def test_folders_without_a_run(tmp_path):
    assert read(tmp_path)["state"] == "empty"
    assert read(tmp_path / "absent")["state"] == "missing"
    (tmp_path / "config.yaml").write_text("{: broken")
    (tmp_path / "run.json").write_text("[]")
    (tmp_path / "health.jsonl").write_text("{half")
    assert read(tmp_path)["facts"] == []


def test_a_long_run_says_that_its_curves_are_sampled(tmp_path):
    rows = [metrics(step) for step in range(1, 2501)]
    run = read(write_run(tmp_path / "run", steps=1, rows=rows))
    assert len(run["steps"]) == 2000
    assert "Curves show 2,000 of 2,500 logged steps; all of them are in metrics.jsonl." in run["notes"]


def test_a_pass_rate_that_is_the_mean_is_not_told_twice(tmp_path):
    rows = [
        {
            "step": step,
            "eval_rewards/a/mean": step / 10,
            "eval_rewards/a/pass@1": step / 10,
            "eval_rewards/a/pass@4": 1.0,
        }
        for step in (0, 5)
    ]
    (held_out,) = read(write_run(tmp_path / "run", steps=1, rows=rows))["held_out"]
    assert [line["metric"] for line in held_out["lines"]] == ["rewards/a/mean", "rewards/a/pass@4"]


@pytest.mark.parametrize(
    ("keys", "method"),
    [({"rl": None}, "SFT"), ({"rl": None, "reward_model": True}, "Reward model"), ({"rl": "simpo"}, "SimPO")],
)
def test_methods_have_names(tmp_path, keys, method):
    assert read(write_run(tmp_path / "run", config={**CONFIG, **keys}))["method"] == method


@pytest.mark.parametrize(
    ("keys", "sampler"),
    [
        ({}, "in process"),
        ({"use_vllm": True}, "vLLM server"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "vLLM in the training process"),
    ],
)
def test_the_sampler_is_named(tmp_path, keys, sampler):
    config = {**CONFIG, "trl": {"num_generations": 4, **keys}}
    assert dict(read(write_run(tmp_path / "run", config=config))["facts"])["Sampler"] == sampler


def test_stages_are_read_in_order(tmp_path):
    for name in ("stage-10-last", "stage-2-middle", "stage-1-first"):
        write_run(tmp_path / name)
    (tmp_path / "stage-3-empty").mkdir()
    assert [path.name for path in folders_of(tmp_path)] == ["stage-1-first", "stage-2-middle", "stage-10-last"]
    assert folders_of(tmp_path / "stage-3-empty") == [tmp_path / "stage-3-empty"]


def test_warnings_on_settings_are_those_of_the_doctor(tmp_path):
    keys = {"base_model": "x", "rl": "dpo", "learning_rate": 0.1, "datasets": [{"path": "x"}]}
    folder = write_run(tmp_path / "run", config=keys)
    reader = RunReader(folder)
    (warning,) = reader.read("run")["warnings"]
    assert warning.startswith("learning_rate: 0.1 is far above")
    assert [one.says for one in check_run(folder) if one.what == "keys"] == [warning]
    assert f"warning: {warning}"[:60] in text_page(PageReader([folder]).read())
    (folder / "config.yaml").write_text("rl: dpo\nlearning_rate: 1e-6\n")
    assert reader.read("run")["warnings"] == []


def test_failures_of_a_reward_are_none_where_none_is_logged(tmp_path):
    rows = [{"step": step, "rewards/a/mean": 0.5} for step in range(1, 6)]
    for row, failed in ((rows[1], 2.0), (rows[4], 2.0)):
        row |= {"rewards/a/failed": failed, "rewards/a/failed_share": 0.1}
    page = PageReader([write_run(tmp_path / "run", rows=rows)]).read()
    assert page["runs"][0]["metrics"]["rewards/a/failed"] == [0.0, 2.0, 0.0, 0.0, 2.0]
    assert [chart["title"] for chart in page["charts"]] == ["a", "a without a value"]


def test_remedies_on_the_page_name_what_is_typed(tmp_path):
    verdict = {"name": "kl explosion", "level": "alarm", "step": 8, "steps": 2, "meaning": "far"}
    remedy = "from before (`resume_from_checkpoint=RUN/checkpoint-N`), or `upweight rewards CONFIG`"
    folder = write_run(tmp_path / "run", rows=[metrics(step) for step in range(1, 9)])
    (folder / "health.jsonl").write_text(json.dumps(verdict | {"remedy": remedy}) + "\n")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_bytes(b"x")
    mark_whole(folder / "checkpoint-5")
    (typed,) = (one["remedy"] for one in read(folder)["health"])
    assert f"resume_from_checkpoint={folder / 'checkpoint-5'}`" in typed
    assert f"`upweight rewards {folder / 'config.yaml'}`" in typed
