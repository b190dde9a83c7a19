"""Async work for code that is not async: an event loop in a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """A daemon thread with an event loop; it begins with the first work, and anew with the first after `close`."""

    def __init__(self, name: str) -> None:
        self._name, self._changing = name, threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin some work on the thread."""
        with self._changing:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop; what is under way is dropped."""
        with self._changing:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    stopped = False
    while not stopped:
        # Out of a task, asyncio raises these here too: one user's `sys.exit` would leave everybody else's work undone.
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            stopped = True
    loop.close()
