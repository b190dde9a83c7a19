"""A user's functions, called from a loop that must not stop."""

import asyncio
import threading
import time

import pytest

from upweight.environments.own_calls import OwnCalls, TooSlow


def run(work):
    return asyncio.run(work)


def test_results_and_errors_come_back():
    calls = OwnCalls()

    async def soon(x):
        return x

    def wrong():
        raise KeyError("here")

    assert run(calls(lambda x, y: x + y, 1, y=2, limit=1)) == 3
    assert run(calls(soon, 5, limit=1)) == 5
    with pytest.raises(KeyError, match="here"):
        run(calls(wrong, limit=1))
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(calls(next, iter(()), limit=1))
    calls.close()


def test_a_thread_outlives_its_call_and_takes_the_next():
    calls = OwnCalls()
    first = run(calls(threading.current_thread, limit=5))
    first.join(0.3)  # what it started with PR_SET_PDEATHSIG would die with it
    assert first.is_alive()
    assert run(calls(threading.current_thread, limit=5)) is first


def test_a_hanging_function_is_left_behind_and_others_run():
    calls, release = OwnCalls(), threading.Event()

    async def several():
        stuck = [calls(release.wait, limit=0.2) for _ in range(40)]
        return await asyncio.gather(*stuck, calls(lambda: "well", limit=5), return_exceptions=True)

    began = time.monotonic()
    found = run(several())
    release.set()
    assert time.monotonic() - began < 20
    assert found[-1] == "well"
    assert all(isinstance(one, TooSlow) for one in found[:-1])
