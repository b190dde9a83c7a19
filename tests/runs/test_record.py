"""The record of a run: while it goes on, and however it ends."""

import json
import os

import pytest

from upweight.errors import UserError
from upweight.runs.record import recorded


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
