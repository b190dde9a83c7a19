"""A time limit for foreign Python code that runs in this process."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_SECONDS = 0.5  # seconds between looks


class TimeUp(Exception):
    """The code ran longer than its limit."""

    def __str__(self) -> str:
        return "it ran longer than its time limit"


_deadlines: dict[int, float] = {}  # of threads, by their ids
_lock = threading.Lock()
_watched_process: int | None = None  # a fork has this module's variables, but not its thread


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` inside if the block runs longer; entering costs microseconds. Blocks do not nest."""
    global _watched_process  # noqa: PLW0603
    if _watched_process != os.getpid():
        _watched_process = os.getpid()
        threading.Thread(target=_watch, daemon=True, name="time limits").start()
    thread = threading.get_ident()
    _deadlines[thread] = time.monotonic() + seconds
    try:
        yield
    finally:
        with _lock:
            _deadlines.pop(thread, None)


def _watch() -> None:
    while True:
        time.sleep(INTERVAL_SECONDS)
        with _lock:
            for thread, deadline in list(_deadlines.items()):
                if time.monotonic() > deadline:
                    del _deadlines[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeUp))
