"""Starters: every one validates and trains as it was written; nothing is written over."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from made_runs import metrics_of, write_model
from slow_cases import slow_except
from upweight.cli.app import app
from upweight.cli.starter.init import STARTERS, starter_files, write_starter
from upweight.config import load_config
from upweight.errors import UserError
from upweight.train.run import train

VISION = [name for name in STARTERS if name.startswith("vlm-")]
TRAINED = [name for name in STARTERS if name not in ("gym", *VISION)]  # servers, or a model for images


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("teacher"), max_position_embeddings=1024, intermediate_size=16)


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("method", slow_except(("dpo", "ebft", "grpo", "sft"), TRAINED))
def test_every_starter_validates_and_trains(method, model_folder, teacher_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("init", method)
    assert done.exit_code == 0, done.output
    assert f"cd {method} && upweight train config.yaml" in done.stdout
    monkeypatch.chdir(tmp_path / method)
    assert command("validate", "config.yaml").stdout == "ok\n"
    small = ["max_steps=2", "micro_batch_size=8", "chat_template=chatml", "sequence_len=256", "val_set_size=2"]
    small += ["trl.num_generations=4", "trl.max_completion_length=8"] if method in ("grpo", "gdpo", "ebft") else []
    small += ["trl.max_completion_length=8", f"distill.teacher={teacher_folder}"] if method == "distill" else []
    train(load_config(Path("config.yaml"), [f"base_model={model_folder}", *small]))
    rows = metrics_of(tmp_path / method / "out")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


@pytest.mark.parametrize("method", VISION)
def test_starters_with_images_learn_from_their_pictures(method, tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    from tiny_vision import processor, vision_model
    from upweight.cli.starter.pictures import count_of, picture

    vision_model("llava").save_pretrained(tmp_path / "model")
    processor("llava").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert command("init", method).exit_code == 0
    monkeypatch.chdir(tmp_path / method)
    assert command("validate", "config.yaml").stdout == "ok\n"
    assert Path("pictures/05.png").read_bytes() == picture(5)
    words = ["one", "two", "three", "four"]
    rows = [json.loads(line) for line in next(Path().glob("*.jsonl")).read_text().splitlines()]
    answers = [row.get("answer") or row["messages"][-1]["content"] for row in rows]
    assert answers == [words[count_of(number) - 1] for number in range(len(rows))]
    small = [f"base_model={tmp_path / 'model'}", "processor_kwargs={}", "sequence_len=128", "adapter=", "lora_r=null"]
    small += ["lora_alpha=null", "lora_target_linear=null", "learning_rate=3e-3", "logging_steps=1"]
    small += ["max_steps=2", "trl.num_generations=4"] if method == "vlm-grpo" else ["max_steps=60"]
    train(load_config(Path("config.yaml"), small))
    losses = [row["loss"] for row in metrics_of(Path("out")) if "loss" in row]
    assert len(losses) == 2 if method == "vlm-grpo" else losses[-1] < 0.4 * losses[0]


@pytest.mark.parametrize("method", STARTERS)
def test_a_starter_says_what_its_files_are_and_how_rows_look(method, tmp_path):
    files = starter_files(method)
    readme = files["README.md"]
    assert all(f"`{name}`" in readme for name in files if name != "README.md")
    (rows,) = (text for name, text in files.items() if name.endswith(".jsonl"))
    assert rows.splitlines()[0] in readme
    assert len({json.dumps(json.loads(line)) for line in rows.splitlines()}) >= 8
    load_config(write_starter(method, tmp_path) / "config.yaml")


def test_nothing_is_written_over_and_nothing_half_written(tmp_path):
    (tmp_path / "rewards.py").write_text("mine")
    done = command("init", "grpo", tmp_path)
    assert isinstance(done.exception, UserError)
    assert "rewards.py would be written over" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    assert (tmp_path / "rewards.py").read_text() == "mine"


def test_an_unknown_method_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"no starter 'grop'.*grpo"):
        starter_files("grop")


def test_without_a_method_they_are_listed():
    shown = command("init").stdout.splitlines()
    assert [line.split()[2] for line in shown] == list(STARTERS)
