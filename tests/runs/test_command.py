"""The command that continues a run."""

import json
import shlex
import shutil
from contextlib import suppress

import pytest

from upweight.doctor.run import check_run
from upweight.runs.checkpoints import mark_whole
from upweight.runs.command import resume_advice, resume_words, started_by, training_into
from upweight.runs.record import recorded
from upweight.runs.report.run import RunReader


def test_the_command_has_the_overrides_as_a_shell_takes_them():
    given = ["my runs/c.yaml", "trl.reward_funcs=[a.b, len]", "--learning_rate", "1e-5", "--num-processes", "2"]
    with started_by(given, ["--tee", "3"]):
        words = shlex.split(resume_words().strip("`"))
        assert words == ["upweight", "train", *given, "--resume", "--", "--tee", "3"]
    assert resume_words() == "--resume"


def test_where_this_run_began_is_not_gone_back_to():
    given = [
        "c.yaml",
        "resume_from_checkpoint=out/checkpoint-2",
        "seed=1",
        "--resume_from_checkpoint",
        "x",
        "max_steps=3",
    ]
    with started_by(given):
        assert resume_words() == "`upweight train c.yaml seed=1 max_steps=3 --resume`"


def test_ranks_say_the_command_that_started_them(monkeypatch):
    with started_by(["c.yaml", "--num-processes", "2"]):
        monkeypatch.setenv("RANK", "1")
        with started_by(["c.yaml", "--stage", "1"]):
            assert resume_words() == "`upweight train c.yaml --num-processes 2 --resume`"


def test_the_record_keeps_it_without_credentials_and_doctor_says_it(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"x")
    mark_whole(tmp_path / "checkpoint-3")
    given = ["c.yaml", "hub_token=hf_secretsecretsecret", "output_dir=my out"]
    with started_by(given), pytest.raises(KeyboardInterrupt), recorded(tmp_path, {}, writes=True):
        raise KeyboardInterrupt
    command = json.loads((tmp_path / "run.json").read_text())["command"]
    assert command == "upweight train c.yaml 'hub_token=***' 'output_dir=my out' --resume"
    assert f"go on from step 3 with `{command}`" in check_run(tmp_path)[0].remedy


def test_a_run_that_was_moved_or_copied_goes_on_where_it_lies_now(tmp_path):
    begun, copied = tmp_path / "out", tmp_path / "my copy"
    typed = started_by(["c.yaml", "output_dir=out", "seed=1"], ["--tee", "3"])
    with typed, suppress(KeyboardInterrupt), recorded(begun, {}, writes=True):
        (begun / "checkpoint-3").mkdir()
        (begun / "checkpoint-3" / "model.safetensors").write_bytes(b"x")
        mark_whole(begun / "checkpoint-3")
        raise KeyboardInterrupt
    shutil.copytree(begun, copied)
    assert "`upweight train c.yaml output_dir=out seed=1 --resume -- --tee 3`" in check_run(begun)[0].remedy
    said = f"`upweight train c.yaml seed=1 'output_dir={copied.resolve()}' --resume -- --tee 3`"
    assert said in check_run(copied)[0].remedy
    assert said in RunReader(copied).read("copy")["advice"]


def test_a_run_without_a_checkpoint_is_not_to_be_resumed(tmp_path):
    with started_by(["c.yaml"]), training_into(tmp_path):
        (tmp_path / "checkpoint-3").mkdir()  # being written
        assert resume_advice().startswith("start again: there is no whole checkpoint")
        mark_whole(tmp_path / "checkpoint-3")
        assert resume_advice() == "go on from step 3 with `upweight train c.yaml --resume`"
    assert resume_advice() == "go on with --resume"
