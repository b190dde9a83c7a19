"""A line after each minute or so without progress, which says what the process is doing."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from upweight.log import logger

FIRST_SECONDS = 60.0  # seconds without progress before the first line; each further one comes after twice the time
VARIABLE = "UPWEIGHT_HEARTBEAT"  # of the environment: these seconds, for tests
_activities: list[str] = []  # of all threads, in the order in which they began
_last_progress = time.monotonic()
_watching = threading.Lock()  # held by the one heartbeat of this process


@contextmanager
def activity(text: str, *, progresses: bool = True) -> Iterator[None]:
    """Name what happens inside for `heartbeat`; its begin and end are progress, unless it is one of many tries."""
    _activities.append(text)
    if progresses:
        progressed()
    try:
        yield
    finally:
        _activities.remove(text)
        if progresses:
            progressed()


def progressed() -> None:
    """Note that something was finished, so that the time without progress starts from zero."""
    global _last_progress  # noqa: PLW0603
    _last_progress = time.monotonic()


@contextmanager
def heartbeat(first: float | None = None) -> Iterator[None]:
    """Warn while an activity makes no progress, also where only warnings are shown; inside another, do nothing."""
    first = first or float(os.environ.get(VARIABLE, FIRST_SECONDS))
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ended, first), daemon=True, name="heartbeat")
    if not _watching.acquire(blocking=False):
        yield
        return
    try:
        thread.start()
        yield
    finally:
        ended.set()
        if thread.ident is not None:  # it could be started
            thread.join()
        _watching.release()


def _watch(ended: threading.Event, first: float) -> None:
    limit = first
    while not ended.wait(first / 20):
        silent = time.monotonic() - _last_progress
        if silent < first or not _activities:
            limit = first
        elif silent >= limit:
            limit = 2 * silent
            logger.warning("no progress for %.0f s: %s", silent, "; ".join(dict.fromkeys(_activities)))
