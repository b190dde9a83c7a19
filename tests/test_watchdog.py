"""Code that does not end is ended, in whatever thread or process it runs."""

import multiprocessing
import threading
import time

import pytest

from upweight.watchdog import TimeUp, time_limit


def loops():
    with time_limit(0.3):
        while True:
            pass


def ended():
    with pytest.raises(TimeUp):
        loops()
    return True


def test_a_loop_without_end_is_ended():
    assert ended()


def test_in_a_thread_and_after_a_fork():
    results = []
    thread = threading.Thread(target=lambda: results.append(ended()))
    thread.start()
    thread.join(20)
    assert results == [True]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(ended).get(20)


def test_code_that_ends_in_time_is_left_alone():
    for _ in range(1000):
        with time_limit(0.5):
            pass
    time.sleep(1.2)
