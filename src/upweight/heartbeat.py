"""A line after each minute or so without progress, which says what the process is doing."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from upweight.log import logger

FIRST = 60.0  # seconds without progress before the first line; each further one comes after twice the time
_activities: list[str] = []  # of all threads, in the order in which they began
_last_progress = time.monotonic()


@contextmanager
def activity(text: str) -> Iterator[None]:
    """Name what happens inside, such as `waiting for rollouts`, for the lines of `heartbeat`."""
    _activities.append(text)
    progressed()
    try:
        yield
    finally:
        _activities.remove(text)
        progressed()


def progressed() -> None:
    """Note that something was finished, so that the time without progress begins anew."""
    global _last_progress  # noqa: PLW0603
    _last_progress = time.monotonic()


@contextmanager
def heartbeat(first: float = FIRST) -> Iterator[None]:
    """Warn while there is no progress inside, also where only warnings are shown."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ended, first), daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(ended: threading.Event, first: float) -> None:
    limit = first
    while not ended.wait(first / 20):
        silent = time.monotonic() - _last_progress
        if silent < first:
            limit = first
        elif silent >= limit:
            limit = 2 * silent
            doing = "; ".join(dict.fromkeys(_activities)) or "between activities"
            logger.warning("no progress for %.0f s: %s", silent, doing)
