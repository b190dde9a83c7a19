"""Async work for code that is not async."""

import asyncio
import threading

import pytest

from upweight.event_loop import EventLoop


async def where() -> tuple[str, bool, asyncio.AbstractEventLoop]:
    thread = threading.current_thread()
    return thread.name, thread.daemon, asyncio.get_running_loop()


async def current_thread() -> threading.Thread:
    return threading.current_thread()


def test_work_runs_on_one_loop_in_a_daemon_thread_and_on_another_after_closing():
    loop = EventLoop("episodes")
    loop.close()  # nothing has begun
    first, second = loop.start(where()).result(10), loop.start(where()).result(10)
    assert first[:2] == ("episodes", True)
    assert second[2] is first[2]
    thread = loop.start(current_thread()).result(10)
    loop.close()
    thread.join(10)
    assert first[2].is_closed()
    assert loop.start(where()).result(10)[2] is not first[2]
    loop.close()


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_work_that_would_end_the_program_leaves_the_loop_running(end):
    async def leaves() -> None:
        raise end

    loop = EventLoop("episodes")
    with pytest.raises(end):
        loop.start(leaves()).result(10)
    assert loop.start(where()).result(10)[0] == "episodes"
    loop.close()
