"""Trained models that commands are given."""

import json
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from made_runs import upweight
from upweight import log
from upweight.cli.inputs import find_trained, load_with_notices, read_rows
from upweight.config import ConfigError
from upweight.errors import UserError
from upweight.runs.checkpoints import mark_whole
from upweight.runs.files import no_such_run


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch):
    monkeypatch.setattr(log, "_warned", set())


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("of_run", [True, False])
def test_a_damaged_checkpoint_is_refused_before_it_is_read(name, of_run, tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / name).write_text(json.dumps({"base_model_name_or_path": "m"}))
    mark_whole(checkpoint)
    if of_run:
        (tmp_path / "config.yaml").write_text("base_model: m\ndatasets: [{path: d, type: alpaca}]\n")
    assert (find_trained(str(checkpoint), []).adapter is None) == (name == "config.json")
    (checkpoint / name).write_bytes(b"\0" * 32)
    with pytest.raises(UserError, match=rf"checkpoint-5 is damaged: {name} "):
        find_trained(str(checkpoint), [])


@pytest.mark.parametrize("more", ["", "batch_sise: 1\n"])
def test_every_command_warns_once_of_pairs_whose_columns_are_named_for_the_other_role(more, tmp_path, caplog):
    form = "{field_prompt: q, field_chosen: worse reply, field_rejected: better reply}"
    (tmp_path / "my.yaml").write_text(
        f"base_model: m\nrl: dpo\ndatasets: [{{path: d{len(more)}, type: {form}}}]\n{more}"
    )
    for _ in range(2):
        with suppress(ConfigError):
            load_with_notices(tmp_path / "my.yaml", [], asks_hub=False)
    assert caplog.text.count("whose names say the opposite: exchange them") == 1


def test_a_run_that_has_not_ended_is_answered_with_its_newest_checkpoint(tmp_path):
    (tmp_path / "config.yaml").write_text("base_model: m\nadapter: lora\ndatasets: [{path: d, type: alpaca}]\n")
    with pytest.raises(UserError, match=r"holds no model.*CONFIG --resume` finishes it, and .*save_model\(\)\.$"):
        find_trained(str(tmp_path), [])
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"Until then, name its newest checkpoint: .*checkpoint-10\.$"):
        find_trained(str(tmp_path), [])
    assert find_trained(str(tmp_path / "checkpoint-10"), []).adapter == tmp_path / "checkpoint-10"


def test_a_checkpoint_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-5" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"out/checkpoint-7: there is no such .* Did you mean 'out/checkpoint-5'"):
        find_trained("out/checkpoint-7", [])


def test_the_folder_of_a_script_that_saved_no_model_is_answered_with_how_to_save_one(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds no model: .*a script ends with trainer\.save_model\(\)"):
        find_trained(str(tmp_path), [])


def test_names_that_are_not_there_are_answered_with_those_that_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert no_such_run(Path("nope")).startswith("nope: there is no such run. There is none here")
    for name, mark in (("dpo-out", "metrics.jsonl"), ("mine/out", "adapter_config.json"), ("notes", "notes.txt")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / mark).write_text("{}")
    assert no_such_run(Path("nope")) == "nope: there is no such run. Here are: dpo-out, mine/out."
    assert "Did you mean 'dpo-out'?" in no_such_run(Path("dpo_uot"))
    assert "Did you mean 'mine/out'?" in no_such_run(Path("out"))
    with pytest.raises(UserError, match=r"nope: there is no such config, run or model folder.*ORGANISATION/MODEL"):
        find_trained("nope", [])
    assert find_trained("some-org/nope", []).model.base_model == "some-org/nope"
    assert find_trained("gpt2", []).model.base_model == "gpt2"


@pytest.mark.parametrize("content", ["question,answer\nWhy?,So.\n", "question;answer\nWhy?;So.\n"])
def test_a_table_is_answered_with_the_command_that_writes_its_json_lines(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asked.csv").write_text(content)
    with pytest.raises(UserError, match=r"asked\.csv: is a table") as error:
        read_rows(Path("asked.csv"))
    command = shlex.split(str(error.value).split("`")[-2])
    exec(command[2].replace("YOUR COLUMN", "question"), {})
    assert read_rows(Path("asked.jsonl")) == [{"prompt": "Why?", "answer": "So."}]


def test_watch_in_text_of_a_run_that_is_not_there(tmp_path):
    done = upweight("watch", "nope", "--text", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nope: there is no such run." in done.stderr


def test_notices_on_names_are_one_line_but_where_one_asks(tmp_path, caplog):
    caplog.set_level("INFO")
    file = tmp_path / "axolotl.yaml"
    keys = ["bf16: auto", "flash_attention: true", "pad_to_sequence_len: true", "wandb_entity:", "lr: 3e-1"]
    file.write_text("\n".join(["base_model: m", "datasets: [{path: d, type: alpaca}]", *keys]))
    load_with_notices(file, [])
    rate, line = caplog.messages
    assert "learning_rate: 0.3 is far above" in rate  # it changes what is trained
    names = "3 notices on keys that have other names here or need not be set"
    assert line == f"{names}: upweight validate {file} prints them"
    caplog.clear()
    load_with_notices(file, [], whole=True)
    assert [one.split()[1] for one in caplog.messages] == ["lr:", "flash_attention:", "pad_to_sequence_len:"]
