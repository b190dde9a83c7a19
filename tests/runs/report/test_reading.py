"""Files that grow, are cut off or are written anew."""

import json
from itertools import pairwise

import pytest

from upweight.runs.report.reading import POINTS, JsonLines, columns, evenly, plain, read_json


def test_lines_are_read_as_they_come_and_half_a_line_waits(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    assert lines.read() == []
    file.write_text('{"step": 1}\n{"step": 2')
    assert lines.read() == [{"step": 1}]
    with file.open("a") as more:
        more.write("2}\nnot json\n[1]\n\n")
    assert lines.read() == [{"step": 1}, {"step": 22}]
    assert lines.unreadable == 2


def test_a_file_that_was_written_anew_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    lines = JsonLines(file)
    lines.read()
    (tmp_path / "new").write_text('{"step": 7}\n{"step": 8}\n{"step": 9}\n')
    (tmp_path / "new").replace(file)
    assert [row["step"] for row in lines.read()] == [7, 8, 9]
    file.unlink()
    assert lines.read() == []


def test_columns_join_the_rows_of_a_step_and_leave_out_what_is_no_number():
    rows = [
        {"step": 1, "loss": 0.5, "kl": "nan", "epoch": 1.0},
        {"step": 1, "eval_loss": 0.7},
        {"step": 1, "eval_other_loss": 0.8},
        {"step": 2, "loss": 0.123456789, "epoch": 1.0},
        {"step": 3, "epoch": 2.0},
        {"loss": 9.0},
    ]
    assert columns(rows, evaluation=False)[0] == [1, 2]
    assert columns(rows, evaluation=False)[1]["loss"] == [0.5, 0.123457]
    assert "kl" not in columns(rows, evaluation=False)[1]
    assert columns(rows, evaluation=True) == ([1], {"eval_loss": [0.7], "eval_other_loss": [0.8]})


def test_long_series_are_sampled_evenly_with_both_ends():
    steps, values = columns(({"step": n, "loss": float(n)} for n in range(1, 10_001)), evaluation=False)
    assert len(steps) == POINTS
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert values["loss"] == [float(f"{step:.6g}") for step in steps]
    assert max(after - before for before, after in pairwise(steps)) <= 6


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_evenly_takes_no_more_than_asked(count):
    found = evenly(list(range(9)), count)
    assert len(found) == count == len(set(found))


def test_values_fit_into_json_that_every_browser_reads():
    value = plain({"a": [float("inf"), 1.23456789, True, None], "b": "x" * 9, "c": "\ud800"}, 5)
    assert value == {"a": [None, 1.23457, True, None], "b": "xxxxx … (4 more letters)", "c": "?"}
    json.dumps(value, allow_nan=False).encode()


def test_a_broken_object_is_none(tmp_path):
    (tmp_path / "half").write_text('{"state": "run')
    (tmp_path / "list").write_text("[1]")
    assert [read_json(tmp_path / name) for name in ("half", "list", "absent")] == [{}, {}, {}]
