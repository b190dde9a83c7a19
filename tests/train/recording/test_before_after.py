"""Held-out rewards before against after, and the completions behind them."""

import json

import pytest

from made_runs import metrics_of, write_online
from upweight.config import load_config
from upweight.train.recording.callbacks import before_and_after
from upweight.train.recording.completions import cut_completions
from upweight.train.run import train


def test_each_set_is_compared_with_its_first_evaluation():
    rows = [
        {"step": 0, "eval_reward": 0.21, "eval_rewards/format/pass@1": 0.3, "eval_completions/max_length": 9.0},
        {"step": 1, "loss": 0.0, "reward": 0.5},
        {"step": 5, "eval_reward": 0.4},
        {"step": 9, "eval_reward": 0.63, "eval_rewards/format/pass@1": 0.9},
        {"step": 0, "eval_hard_reward": 0.0},
        {"step": 9, "eval_hard_reward": 0.1, "eval_hard_rewards/new/mean": 1.0},  # not there before
    ]
    assert before_and_after(rows) == [
        "held out, step 0 -> 9:",
        "  reward                 0.21 -> 0.63",
        "  rewards/format/pass@1  0.3 -> 0.9",
        "held out (hard), step 0 -> 9:",
        "  reward  0 -> 0.1",
    ]
    assert before_and_after(rows[:2]) == []


@pytest.mark.parametrize("eval_steps", [3, 4])  # the last evaluation comes after the last checkpoint, or before it
def test_a_run_that_is_resumed_at_its_end_is_not_evaluated_again(eval_steps, model_folder, tmp_path):
    keys = {"max_steps": 4, "save_steps": 4, "eval_steps": eval_steps, "val_set_size": 2}  # ends within an epoch
    config = load_config(write_online(tmp_path, model_folder, **keys))
    train(config)
    rows = metrics_of(tmp_path / "out")
    train(config, resume=True)
    assert metrics_of(tmp_path / "out") == rows


def test_a_run_is_evaluated_before_the_first_step_and_after_the_last(model_folder, tmp_path, caplog):
    caplog.set_level("INFO", "upweight")
    train(load_config(write_online(tmp_path, model_folder, max_steps=3, eval_steps=2, val_set_size=2)))
    rows = metrics_of(tmp_path / "out")
    assert [row["step"] for row in rows if "eval_reward" in row] == [0, 2, 3]
    assert "held out, step 0 -> 3:" in caplog.messages
    files = tmp_path / "out" / "completions"
    assert sorted(file.name for file in files.glob("eval_*")) == [f"eval_step_{step:05d}.jsonl" for step in (0, 2, 3)]
    written = [json.loads(line) for line in (files / "eval_step_00003.jsonl").read_text().splitlines()]
    assert len(written) == 2 * 4
    mean = sum(row["rewards"]["vowels"] for row in written) / len(written)
    assert abs(mean - rows[-1]["eval_rewards/vowels/mean"]) < 1e-6
    assert {row["step"] for row in written} == {3}
    assert (tmp_path / "out" / "health.jsonl").read_text() == ""

    cut_completions(tmp_path / "out", 2)
    assert sorted(file.name for file in files.iterdir()) == [
        "eval_step_00000.jsonl", "eval_step_00002.jsonl", "step_00001.jsonl", "step_00002.jsonl",
    ]  # fmt: skip
    cut_completions(tmp_path / "out", -1)
    assert list(files.iterdir()) == []
