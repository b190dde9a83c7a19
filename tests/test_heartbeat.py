"""Silence is reported with what goes on, at growing intervals, and not while there is progress."""

import time

from upweight.heartbeat import activity, heartbeat, progressed


def test_a_long_silence_is_reported_a_few_times_with_its_reason(caplog):
    with heartbeat(0.2), activity("waiting for rollouts"), activity("sampling 8 completions"):
        time.sleep(1.1)
    lines = [record.message for record in caplog.records]
    assert lines
    assert len(lines) <= 3
    assert all(line.startswith("no progress for ") for line in lines)
    assert all(line.endswith(" s: waiting for rollouts; sampling 8 completions") for line in lines)


def test_progress_keeps_it_quiet(caplog):
    with heartbeat(0.5), activity("a step"):
        for _ in range(20):
            time.sleep(0.05)
            progressed()
    assert not caplog.records
