"""A user's functions, called from a loop that must not stop."""

import asyncio
import sys
import threading
import time

import pytest

from upweight.environments.python_class import CallTimeout, UserCalls


def run(work):
    return asyncio.run(work)


def test_results_and_errors_come_back():
    calls = UserCalls()

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


def test_code_that_ends_the_program_only_fails():
    calls = UserCalls()

    async def leaves():
        sys.exit(3)

    async def leaves_in_a_task():
        await asyncio.gather(leaves())

    async def stays():
        return "well"

    def interrupts():
        raise KeyboardInterrupt

    for function, said in (
        (sys.exit, r"sys\.exit\(\)"),
        (lambda: sys.exit("bye"), r"sys\.exit\('bye'\)"),
        (leaves, r"sys\.exit\(3\)"),
        (leaves_in_a_task, r"sys\.exit\(3\)"),
        (interrupts, "KeyboardInterrupt"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run(calls(function, limit=5))
        assert run(calls(stays, limit=5)) == "well"
    calls.close()


def test_a_caller_that_is_cancelled_drops_its_call():
    calls, dropped = UserCalls(), threading.Event()

    async def waits():
        try:
            await asyncio.sleep(60)
        finally:
            dropped.set()

    async def gives_up():
        await asyncio.wait_for(calls(waits, limit=60), 0.2)

    with pytest.raises(TimeoutError):
        run(gives_up())
    assert dropped.wait(10)
    calls.close()


def test_a_thread_outlives_its_call_and_takes_the_next():
    calls = UserCalls()
    first = run(calls(threading.current_thread, limit=5))
    first.join(0.3)  # what it started with PR_SET_PDEATHSIG would die with it
    assert first.is_alive()
    assert run(calls(threading.current_thread, limit=5)) is first


def test_a_hanging_function_is_left_behind_and_others_run():
    calls, release = UserCalls(), threading.Event()

    async def several():
        stuck = [calls(release.wait, limit=0.2) for _ in range(40)]
        return await asyncio.gather(*stuck, calls(lambda: "well", limit=5), return_exceptions=True)

    began = time.monotonic()
    found = run(several())
    release.set()
    assert time.monotonic() - began < 20
    assert found[-1] == "well"
    assert all(isinstance(one, CallTimeout) for one in found[:-1])
