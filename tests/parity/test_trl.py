"""Losses and gradient norms against what TRL gave for the same script (`python -m bench.parity --record`).

Process reward models: TRL 1.10 (`PYTHONPATH=FOLDER_OF_1.10 python tests/parity_script.py trl "prm"`).
"""

import json
from pathlib import Path

import pytest

from parity_script import CASES, DIFFERENT, PRM_CASES, PRM_DIFFERENT, run
from upweight.methods.dpo import LossType
from upweight.methods.policy_gradient import LossType as PolicyLossType

RECORD, PRM_RECORD = (
    json.loads((Path(__file__).parent / f"trl_{which}.json").read_text()) for which in ("1_16", "1_10")
)


def cases(*tables):
    """One case in four; the others are slow tests."""
    every = [item for table in tables for item in table.items()]
    return [pytest.param(*item, marks=[pytest.mark.slow] if number % 4 else []) for number, item in enumerate(every)]


def differences(name, case, folder):
    ours, theirs = run("upweight", case, folder), (RECORD | PRM_RECORD)[name]
    return [
        abs(own - other) / max(1.0, abs(other))
        for key in ("loss", "grad_norm")
        for own, other in zip(ours[key], theirs[key], strict=True)
    ]


def test_every_case_is_recorded():
    assert RECORD.keys() == CASES.keys() | DIFFERENT.keys()
    assert PRM_RECORD.keys() == PRM_CASES.keys() | PRM_DIFFERENT.keys()
    losses = [case["config"].get("loss_type", []) for case in CASES.values()]
    assert {name for named in losses if isinstance(named, list) for name in named} == set(LossType.__args__)
    assert set(PolicyLossType.__args__) <= {name for name in losses if isinstance(name, str)}


@pytest.mark.parametrize(("name", "case"), cases(CASES, PRM_CASES))
def test_same_numbers(name, case, tmp_path):
    found = differences(name, case, tmp_path)
    assert len(found) == 8
    assert max(found) < 1e-4


@pytest.mark.parametrize(("name", "case"), cases(DIFFERENT, PRM_DIFFERENT))
def test_chosen_differences_are_there(name, case, tmp_path):
    assert max(differences(name, case, tmp_path)) > 1e-3
