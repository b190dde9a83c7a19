"""Series and values for the page."""

import json
from itertools import pairwise

import pytest

from upweight.runs.report.reading import POINTS, columns, evenly, plain


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
