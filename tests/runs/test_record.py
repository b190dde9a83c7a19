"""The record of a run: while it goes on, and however it ends."""

import errno
import json
import os

import pytest

from upweight.errors import UserError
from upweight.runs.files import this_machine
from upweight.runs.record import earlier_run, recorded


def record_of(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_run_that_ends_well(tmp_path):
    with recorded(tmp_path / "run", {"rows": 5}, writes=True):
        under_way = record_of(tmp_path / "run")
        assert (under_way["state"], under_way["pid"], under_way["rows"]) == ("running", os.getpid(), 5)
    ended = record_of(tmp_path / "run")
    assert (ended["state"], ended["rows"]) == ("done", 5)
    assert ended["ended"] >= ended["started"]
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (UserError("loss is nan"), "failed", "loss is nan"),
        (ValueError("odd"), "failed", "ValueError: odd"),
        (SystemExit(143), "stopped", None),
        (KeyboardInterrupt(), "stopped", None),
    ],
)
def test_a_run_that_does_not(tmp_path, error, state, message):
    with pytest.raises(type(error)), recorded(tmp_path, {}, writes=True):
        raise error
    assert record_of(tmp_path)["state"] == state
    assert record_of(tmp_path).get("message") == message
    assert (tmp_path / "report.html").is_file()


def test_other_ranks_write_nothing(tmp_path):
    with recorded(tmp_path / "run", {}, writes=False):
        pass
    assert not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_written_is_said_and_does_not_fail_the_run(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    with recorded(tmp_path, {}, writes=True):
        pass
    assert record_of(tmp_path)["state"] == "done"
    assert "the report could not be written" in caplog.text


def test_a_report_is_not_missed_where_the_folder_cannot_be_written(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match="cannot be written to"), recorded(tmp_path, {}, writes=True):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "the report could not be written" not in caplog.text


def written(folder, checkpoint=None, **record):
    (folder / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
    (folder / "run.json").write_text(json.dumps({"state": "running", "machine": this_machine(), **record}))
    if checkpoint is not None:
        (folder / f"checkpoint-{checkpoint}").mkdir()
        (folder / f"checkpoint-{checkpoint}" / "whole.json").write_text("{}")


def test_a_run_whose_process_is_gone_was_killed_and_continues_from_its_checkpoint(tmp_path):
    gone = 2**22 + 1  # more than any process id
    written(tmp_path, checkpoint=4, pid=gone)
    earlier = earlier_run(tmp_path)
    assert earlier.holds == f"a run of 5 steps, which was killed (its process {gone} is gone)"
    assert earlier.ways.startswith("`--resume` continues it from step 4, `--overwrite` trains from the beginning")


def test_a_killed_run_without_a_checkpoint_cannot_be_resumed(tmp_path):
    written(tmp_path, pid=2**22 + 1)
    assert earlier_run(tmp_path).ways.startswith("It left no checkpoint: `--overwrite` trains from the beginning")


def test_a_run_that_trains_now_is_waited_for_or_ended(tmp_path):
    written(tmp_path, checkpoint=4, pid=os.getpid())
    assert earlier_run(tmp_path) == (
        f"a run of 5 steps, which process {os.getpid()} is training", "Wait for it, or end it"
    )  # fmt: skip
    written(tmp_path, pid=os.getpid(), machine="another")
    assert "which runs on another machine, or was killed there" in earlier_run(tmp_path).holds
