"""Metrics and config as files."""

import json

from transformers import TrainerControl, TrainerState

from upweight.train.run_folder import METRICS, MetricsFile, cut_metrics


def written(folder, *logs):
    file, state = MetricsFile(folder), TrainerState(is_world_process_zero=True)
    for step, log in enumerate(logs, 1):
        state.global_step = step
        file.on_log(None, state, TrainerControl(), logs=log)
    return (folder / METRICS).read_text()


def test_each_log_is_one_line_that_every_parser_reads(tmp_path):
    text = written(tmp_path, {"loss": 0.5}, {"loss": float("nan"), "grad_norm": float("inf")}, {"train_runtime": 3.0})
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": "nan", "grad_norm": "inf"},
    ]


def test_other_ranks_write_nothing(tmp_path):
    MetricsFile(tmp_path).on_log(None, TrainerState(is_world_process_zero=False), None, logs={"loss": 1.0})
    assert not (tmp_path / METRICS).exists()


def test_lines_after_a_step_and_half_lines_are_cut(tmp_path):
    written(tmp_path, {"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0})
    file = tmp_path / METRICS
    file.write_text(file.read_text() + '{"step": 2, "lo')
    cut_metrics(tmp_path, 2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
    cut_metrics(tmp_path, -1)
    assert file.read_text() == ""
    cut_metrics(tmp_path / "nowhere", 3)
