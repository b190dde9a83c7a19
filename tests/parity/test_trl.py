"""Losses and gradient norms against what TRL 1.16 gave for the same script (`python -m bench.parity --record`)."""

import json
from pathlib import Path

import pytest

from parity_script import CASES, DIFFERENT, run
from upweight.methods.dpo import LossType
from upweight.methods.policy_gradient import LossType as PolicyLossType

RECORD = json.loads((Path(__file__).parent / "trl_1_16.json").read_text())


def differences(name, case, folder):
    ours, theirs = run("upweight", case, folder), RECORD[name]
    return [
        abs(own - other) / max(1.0, abs(other))
        for key in ("loss", "grad_norm")
        for own, other in zip(ours[key], theirs[key], strict=True)
    ]


def test_every_case_is_recorded():
    assert RECORD.keys() == CASES.keys() | DIFFERENT.keys()
    losses = [case["config"].get("loss_type", []) for case in CASES.values()]
    assert {name for named in losses if isinstance(named, list) for name in named} == set(LossType.__args__)
    assert set(PolicyLossType.__args__) <= {name for name in losses if isinstance(name, str)}


@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name, tmp_path):
    found = differences(name, CASES[name], tmp_path)
    assert len(found) == 8
    assert max(found) < 1e-4


@pytest.mark.parametrize("name", DIFFERENT)
def test_chosen_differences_are_there(name, tmp_path):
    assert max(differences(name, DIFFERENT[name], tmp_path)) > 1e-3
