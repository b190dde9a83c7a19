"""A tenth of the soak: what a run uses stays flat, with a server that is sampled from beside training."""

import sys

import pytest

from soak.soak import grown, soak


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.timeout(1800)  # long when the machine is busy
def test_a_long_run_uses_no_more_with_time(tmp_path):
    parts = soak(tmp_path, 200)
    assert len(parts) == 10
    assert parts[-1]["checkpoints"] >= 2
    assert not grown(parts)


def test_growth_is_told_of():
    flat = {"main_mb": 300.0, "workers_mb": 20.0, "descriptors": 9, "threads": 6, "processes": 2, "disk_mb": 1.0}
    parts = [flat | {"main_mb": 300.0 + 3 * number} for number in range(10)]
    assert grown([flat] * 10) == {}
    assert set(grown(parts)) == {"main_mb"}
