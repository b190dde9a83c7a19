"""Lengths, the settings they suggest, and the words they are reported in."""

from collections import Counter

import numpy as np

from upweight.data.report import REPORT_JSON, EntryCounts, measure, percentiles

PARTS = [
    EntryCounts(
        "datasets[0] (a.jsonl)", False, 1200, 1190, Counter({"longer than sequence_len": 10}), Counter({"cut": 3})
    ),
    EntryCounts("datasets[0] (a.jsonl)", True, 5, 5),
]


def report():
    lengths = {"prompt": np.arange(1, 101), "completion": np.zeros(100, int), "sequence": np.arange(101, 201)}
    limits = {"max_prompt_length": ("prompt", None), "sequence_len": ("sequence", 150), "other": ("completion", 5)}
    return measure(PARTS, lengths, limits)


def test_percentiles_are_lengths_that_occur():
    assert percentiles(np.arange(1, 101)) == {"50%": 51, "90%": 91, "95%": 96, "99%": 100, "max": 100}


def test_suggestions_are_rounded_up_and_the_present_value_is_judged():
    made = report()
    assert made.suggested == {
        "max_prompt_length": {"99%": 128, "100%": 128},
        "sequence_len": {"99%": 256, "100%": 256},
    }
    assert made.within == {"sequence_len": (150, 0.5)}
    assert set(made.lengths) == {"prompt", "sequence"}


def test_the_report_survives_json():
    assert REPORT_JSON.validate_python(REPORT_JSON.dump_python(report(), mode="json")) == report()


def test_the_report_in_words():
    lines = report().lines()
    assert lines[0] == "datasets[0] (a.jsonl): 1,200 rows read, 1,190 kept; 10 dropped: longer than sequence_len; 3 cut"
    assert lines[1] == "datasets[0] (a.jsonl), for evaluation: 5 rows read, 5 kept"
    assert "suggested sequence_len: 256 keeps all (now 150: 50.0% of rows fit)" in lines
    assert lines[-1] == "prepared 1,190 rows to train on, 5 to evaluate on, in 0.0 s"
