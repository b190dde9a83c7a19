"""An event loop in a separate thread, for async work of code that is not async, and futures that threads settle."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """A daemon thread with an event loop, which starts with the first work, also after `close`."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine on the thread and return its future."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and drop the work that runs on it."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)


def settle(future: "Future[Any]", work: Callable[..., Any], *arguments: Any) -> None:
    """Give a future what some work returns or raises."""
    try:
        future.set_result(work(*arguments))
    except BaseException as error:  # raised where the result is read
        future.set_exception(error)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    stopped = False
    while not stopped:
        # asyncio also raises these here when a task does: one `sys.exit` would stop the work of all others.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            stopped = True
    loop.close()
