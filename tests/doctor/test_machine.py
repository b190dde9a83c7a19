"""The doctor on a machine: versions against the ranges that the package declares."""

from upweight.doctor.machine import _check_version, check_machine


def test_this_machine_is_well():
    assert not [one for one in check_machine() if one.level == "alarm"]
    assert {"versions", "GPU"} <= {one.what.split(" ")[0] for one in check_machine()}


def test_versions_outside_their_range_and_packages_that_are_missing_are_named():
    old = _check_version("torch", ">=99")
    assert (old.level, old.remedy) == ("warning", "pip install 'torch>=99'")
    assert _check_version("torch", ">=1").level == "ok"
    missing = _check_version("no-such-package", ">=1")
    assert (missing.level, missing.says) == ("alarm", "is not installed")
