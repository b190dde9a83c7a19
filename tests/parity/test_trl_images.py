"""Losses and gradient norms on rows with images against TRL's (`python -m bench.parity --images --record`)."""

import json
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from vision_parity_script import CASES, DIFFERENT, run

RECORD = json.loads((Path(__file__).parent / "trl_1_16_images.json").read_text())
OFTEN = ("sft two images", "sft transparent", "dpo", "kto", "grpo")


def test_every_case_is_recorded():
    assert RECORD.keys() == CASES.keys() | DIFFERENT.keys()


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_same_numbers(name, tmp_path):
    ours, theirs = run("upweight", CASES[name], tmp_path), RECORD[name]
    for key in ("loss", "grad_norm"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", DIFFERENT)
def test_chosen_differences_are_there(name, tmp_path):
    ours, theirs = run("upweight", DIFFERENT[name], tmp_path), RECORD[name]
    assert abs(ours["loss"][0] - theirs["loss"][0]) > 1e-3
