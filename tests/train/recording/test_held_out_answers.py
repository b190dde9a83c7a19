"""Offline runs answer held-out prompts before the first step and after the last."""

import json

import pytest

from made_runs import metrics_of, write_config
from upweight.config import load_config
from upweight.runs.report.page import PageReader
from upweight.train.recording import held_out_answers
from upweight.train.run import train


def answers(folder, step):
    file = folder / "completions" / f"eval_step_{step:05d}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(tmp_path, model_folder, *overrides, **keys):
    file = write_config(tmp_path, model_folder, val_set_size=4, max_steps=3, learning_rate=0.05, **keys)
    train(load_config(file, list(overrides)))
    return tmp_path / "out"


def test_answers_before_and_after_are_on_the_page(model_folder, tmp_path):
    out = run(tmp_path, model_folder, eval_samples=2, generation_max_new_tokens=8)
    before, after = answers(out, 0), answers(out, 3)
    assert [row["row"] for row in before] == [row["row"] for row in after] == [0, 1]
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    assert all(row["tokens"] <= 8 and row["in the data"] for row in before)
    assert [row["completion"] for row in before] != [row["completion"] for row in after]
    logged = [row["step"] for row in metrics_of(out) if "eval_loss" in row]
    assert (logged[0], logged[-1]) == (0, 3)
    (shown,) = PageReader([out]).read()["runs"]
    assert [(part["set"], part["step"]) for part in shown["completions"]] == [("eval", 0), ("eval", 3)]
    assert shown["held_out"][0]["lines"][0]["first"] == 0


def test_every_evaluation_is_answered_where_that_is_asked(model_folder, tmp_path):
    sampled = {"generation_max_new_tokens": 4, "generation_temperature": 1.5, "generation_top_k": 50}
    out = run(tmp_path, model_folder, generate_samples=True, eval_steps=1, **sampled)
    rows = [answers(out, step) for step in range(4)]
    assert [len(part) for part in rows] == [3, 3, 3, 3]
    likeliest = run(tmp_path, model_folder, "output_dir=" + str(tmp_path / "likeliest"), eval_samples=3)
    assert likeliest == out
    assert not (tmp_path / "likeliest" / "completions" / "eval_step_00001.jsonl").exists()
    texts = [[row["completion"] for row in part] for part in (rows[0], answers(tmp_path / "likeliest", 0))]
    assert texts[0] != texts[1]


def test_what_is_trained_does_not_depend_on_it(model_folder, tmp_path):
    losses = []
    for name, keys in (("with", {"eval_samples": 2, "generation_max_new_tokens": 4}), ("without", {})):
        (tmp_path / name).mkdir()
        out = run(tmp_path / name, model_folder, **keys)
        losses.append([row["loss"] for row in metrics_of(out) if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_time_is_bounded(model_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(held_out_answers, "LIMIT_SECONDS", 0.0)
    out = run(tmp_path, model_folder, eval_samples=2)
    assert all(not row["finished"] for row in answers(out, 3))
    assert "answers are cut after 0 s" in caplog.text


def test_texts_without_a_prompt_have_no_answer():
    find = held_out_answers._prompt_and_answer
    assert find(0, {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}) is None
    assert find(1, {"input_ids": [1, 2, 3, 4], "loss_mask": [False, False, True, True]}) == (1, [1, 2], [3, 4])
    assert find(2, {"prompt_ids": [5], "chosen_ids": [6], "rejected_ids": [7]}) == (2, [5], [6])
