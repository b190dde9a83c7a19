"""Runs on streams and mixtures: they resume exactly, ranks share every row, and each dataset's loss is logged."""

import json
import random
import time
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml

from made_runs import metrics_of, on_ranks, started, write_config, write_online, write_pairs
from upweight.config import load_config
from upweight.errors import UserError
from upweight.runs.checkpoints import checkpoints_of
from upweight.train.run import build, evaluate, train

STREAM = {"streaming": True, "streaming_buffer_size": 16, "num_epochs": None, "max_steps": 12, "rows": 30}


def run(file, resume=False):
    train(load_config(file), resume=resume)


def run_in_child(file, resume=False):
    process = started(run, file, resume)
    process.join(120)
    return process.exitcode


def write_mixture(folder, model, **keys):
    """A config on two files of pairs."""
    file = write_config(folder, model, **{"num_epochs": None, "max_steps": 12, "mix": "interleave_over", **keys})
    write_pairs(folder / "more.jsonl", 9)
    content = yaml.safe_load(file.read_text())
    (first,) = content["datasets"]
    content["datasets"] = [{**first, "weight": 3}, {**first, "path": str(folder / "more.jsonl"), "weight": 1}]
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
def whole(model_folder, tmp_path_factory):
    """An uninterrupted run on a stream."""
    folder = tmp_path_factory.mktemp("whole")
    run(write_config(folder, model_folder, save_steps=4, **STREAM))
    return folder / "out"


def test_a_run_on_a_stream_ends_at_its_last_step_and_resumes_from_a_checkpoint(whole, model_folder, tmp_path):
    assert [line["step"] for line in metrics_of(whole)] == list(range(1, 13))
    state = json.loads((whole / "checkpoint-4" / "stream.json").read_text())
    assert state["taken"] == 16
    file = write_config(tmp_path, model_folder, save_steps=4, **STREAM)
    run(file)
    train(load_config(file, [f"resume_from_checkpoint={tmp_path}/out/checkpoint-4"]))
    assert metrics_of(tmp_path / "out") == metrics_of(whole)


@pytest.mark.slow
def test_killed_at_any_moment_a_stream_continues_exactly(whole, model_folder, tmp_path):
    draw, killed = random.Random(3), 0
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        file, out = write_config(folder, model_folder, save_steps=2, **STREAM), folder / "out"
        process = started(run, file, True)
        while process.is_alive() and not checkpoints_of(out):
            time.sleep(0.005)
        time.sleep(0.6 * draw.random())
        killed += process.is_alive()
        process.kill()
        process.join()
        assert run_in_child(file, resume=True) == 0
        assert metrics_of(out) == metrics_of(whole)
    assert killed


def test_two_ranks_train_on_what_one_does(whole, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, **{**STREAM, "micro_batch_size": 1})
    on_ranks(run, 2, file)
    for found, right in zip(metrics_of(tmp_path / "out"), metrics_of(whole), strict=True):
        assert found["step"] == right["step"]
        assert found["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert found["num_tokens"] == right["num_tokens"]


def test_the_loss_of_each_dataset_of_a_mixture_is_logged_and_it_resumes(model_folder, tmp_path):
    file = write_mixture(tmp_path, model_folder, save_steps=5)
    run(file)
    lines = metrics_of(tmp_path / "out")
    for line in lines:  # of 4 rows of a step, one is from the second dataset
        assert line["loss"] == pytest.approx((3 * line["loss/pairs"] + line["loss/more"]) / 4, abs=1e-5)
    train(load_config(file, [f"resume_from_checkpoint={tmp_path}/out/checkpoint-5"]))
    assert metrics_of(tmp_path / "out") == lines


def test_a_mixture_of_known_length_counts_epochs(model_folder, tmp_path):
    trainer = build(load_config(write_mixture(tmp_path, model_folder, max_steps=None, num_epochs=1)))
    assert len(trainer.get_train_dataloader()) == 9  # 9 rows are a quarter of 36
    under = write_mixture(tmp_path, model_folder, max_steps=None, num_epochs=1, mix="interleave_under")
    assert len(build(load_config(under)).get_train_dataloader()) == 8  # 22 rows are three quarters of 29


def test_a_stream_of_unknown_length_needs_steps(model_folder, tmp_path):
    with pytest.raises(UserError, match="max_steps: needed to train on a stream"):
        run(write_config(tmp_path, model_folder, **{**STREAM, "max_steps": None}))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_an_epoch_of_known_length_has_each_row_once(drop_last, sizes, model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, rows=10, num_epochs=2, dataloader_drop_last=drop_last, streaming=True)
    content = yaml.safe_load(file.read_text())
    (entry,) = content["datasets"]
    rows = [json.loads(line) for line in Path(entry["path"]).read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    file.write_text(yaml.safe_dump({**content, "datasets": [{**entry, "path": str(tmp_path / "rows.parquet")}]}))
    trainer = build(load_config(file))
    loader = trainer.get_train_dataloader()
    for _ in range(2):
        steps = [step["units"] for step in loader]
        assert [len(step) for step in steps] == sizes
        texts = [tuple(sample.ids) for step in steps for unit in step for sample in unit.samples[:1]]
        assert drop_last or len(set(texts)) == 10  # with it the rows that are left begin the next epoch
    trainer.feed.close()


def test_streams_are_evaluated_on(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, val_set_size=6, eval_steps=6, **STREAM)
    run(file)
    losses = [line["eval_loss"] for line in metrics_of(tmp_path / "out") if "eval_loss" in line]
    assert len(losses) == 2
    held = tmp_path / "held.jsonl"
    held.write_text("".join((tmp_path / "pairs.jsonl").read_text().splitlines(keepends=True)[:6]))
    tests = [{"path": str(held), "type": "chatml.intel", "streaming": True}]
    as_tests = write_config(tmp_path, model_folder, test_datasets=tests, **STREAM)
    assert evaluate(load_config(as_tests))["eval_loss"] == pytest.approx(evaluate(load_config(file))["eval_loss"])


@pytest.mark.parametrize("keys", [{"streaming": True}, {"mix": "interleave_over"}])
def test_prompts_are_streamed_and_resume(keys, model_folder, tmp_path):
    file = write_online(tmp_path, model_folder, max_steps=6, save_steps=3, streaming_buffer_size=3, **keys)
    run(file)
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))
    train(load_config(file, [f"resume_from_checkpoint={tmp_path}/out/checkpoint-3"]))
    seconds = ("seconds", "wait", "tokens_per", "share_of", "_idle")
    plain = lambda found: [{k: v for k, v in row.items() if not any(s in k for s in seconds)} for row in found]  # noqa: E731
    assert plain(metrics_of(tmp_path / "out")) == plain(lines)
