"""Async work for code that is not async."""

import asyncio
import threading

from upweight.event_loop import EventLoop


async def where() -> tuple[str, bool, asyncio.AbstractEventLoop]:
    thread = threading.current_thread()
    return thread.name, thread.daemon, asyncio.get_running_loop()


def test_work_runs_on_one_loop_in_a_daemon_thread_and_on_another_after_closing():
    loop = EventLoop("episodes")
    loop.close()  # nothing has begun
    first, second = loop.start(where()).result(10), loop.start(where()).result(10)
    assert first[:2] == ("episodes", True)
    assert second[2] is first[2]
    loop.close()
    assert loop.start(where()).result(10)[2] is not first[2]
    loop.close()
