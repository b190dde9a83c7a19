"""Calls the user's code from the event loop of episodes, but never on that loop and never beyond a time limit."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from upweight.event_loop import EventLoop


class CallTimeout(Exception):
    """A call did not return within its time limit."""


class UserCalls:
    """Runs sync functions in threads and async ones on a loop of their own, so that one that hangs blocks no other."""

    def __init__(self) -> None:
        self._loop = EventLoop("tools")
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)

    async def __call__(self, function: Callable[..., Any], *arguments: Any, limit: float, **named: Any) -> Any:
        """Return what a function returns; raise what it raises, or CallTimeout."""
        call = partial(function, *arguments, **named)
        done: Future[Any] = Future()
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            done = self._loop.start(_awaited(call))
        else:
            self._jobs.put(partial(_settle, call, done))
            if not self._free.acquire(blocking=False):
                # A daemon: threads cannot be ended, and one that hangs must not keep the program from ending.
                threading.Thread(target=self._work, name="environments", daemon=True).start()
        result = asyncio.wrap_future(done)
        try:
            await asyncio.wait({result}, timeout=limit)
            if not result.done():
                raise CallTimeout(f"it took longer than {limit:g} seconds")
            return result.result()
        finally:
            result.cancel()  # else a late result would be passed to a loop that may be closed by then

    def _work(self) -> None:
        # Forever: a program started with PR_SET_PDEATHSIG (`bwrap --die-with-parent`) dies with the thread.
        while True:
            self._jobs.get()()
            self._free.release()

    def close(self) -> None:
        """Stop the loop and drop the calls that run on it."""
        self._loop.close()


def _settle(call: Callable[[], Any], done: "Future[Any]") -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        done.set_exception(_for_asyncio(error))
    except BaseException as error:  # the user's code: raised in the caller
        done.set_exception(error)
    else:
        done.set_result(result)


async def _awaited(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:
        raise _for_asyncio(error) from error


def _for_asyncio(error: BaseException) -> RuntimeError:
    """Convert an exception that asyncio would not pass on, or would end its loop with."""
    message = type(error).__name__
    if isinstance(error, SystemExit):
        message = f"the code called sys.exit({'' if error.code is None else repr(error.code)})"
    return RuntimeError(message).with_traceback(error.__traceback__)
