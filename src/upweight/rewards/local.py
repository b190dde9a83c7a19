"""Rewards that run in the main process: objects with state, closures, models, and async functions."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from upweight.event_loop import EventLoop, settle
from upweight.rewards.invoke import RewardFailure, RewardLogger, RewardOutcome, failed, invoke
from upweight.rewards.reward import Attempts, Reward, RewardCall, with_retries
from upweight.rewards.workers import GRACE_SECONDS
from upweight.user_modules import describe_error


class _Timeout(BaseException):
    """Raised by the alarm in the main thread; a BaseException, so that no `except Exception` of a reward catches it."""


class InProcessRunner:
    """Calls rewards in this process, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stuck: dict[str, threading.Thread] = {}

    def run(self, reward: Reward, call: RewardCall, limit: float) -> Attempts:
        """Call a reward; a call that raised or timed out is retried group by group."""
        with self._lock:
            return with_retries(lambda part, limit: self._attempt(reward, part, limit), call, limit)

    def _attempt(self, reward: Reward, call: RewardCall, limit: float) -> RewardOutcome:
        work = partial(invoke, reward.function, reward.takes.arguments(call), reward.takes.logs, reward.name, len(call))
        if not reward.has_timeout:
            return work()
        if threading.current_thread() is threading.main_thread():
            return _with_alarm(work, limit)
        earlier = self._stuck.get(reward.name)
        if earlier is not None and earlier.is_alive():
            return RewardFailure("stuck", "an earlier call has not returned")
        done: Future[RewardOutcome] = Future()
        thread = threading.Thread(target=settle, args=(done, work), daemon=True)
        thread.start()
        try:
            return done.result(limit)
        except TimeoutError:  # the thread is abandoned, because threads cannot be killed
            self._stuck[reward.name] = thread
            return RewardFailure("stuck", f"it took longer than {limit:g} seconds", limit)


def _with_alarm(work: Callable[[], RewardOutcome], limit: float) -> RewardOutcome:
    start = time.perf_counter()
    try:
        with _alarm(limit):
            return work()
    except _Timeout as error:
        where = describe_error(error).removeprefix(type(error).__name__)
        return RewardFailure("timed out", f"it took longer than {limit:g} seconds{where}", time.perf_counter() - start)


@contextmanager
def _alarm(limit: float) -> Iterator[None]:
    """Raise in the main thread after `limit` seconds, and every second after that; restore other alarms."""

    def ring(number: int, frame: Any) -> None:
        raise _Timeout

    handler = signal.signal(signal.SIGALRM, ring)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, limit, 1.0)
    start = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler if handler is not None else signal.SIG_DFL)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - start), 0.001), interval)


def start_async(loop: EventLoop, reward: Reward, call: RewardCall, limit: float) -> "Future[Attempts]":
    """Start an async reward on the event loop; several run concurrently."""
    result: Future[Attempts] = Future()
    # A function that blocks the loop instead of awaiting cannot be cancelled from within the loop.
    longest = 2 * limit + GRACE_SECONDS
    blocked = RewardFailure("stuck", f"it took longer than {limit:g} seconds without awaiting anything", longest)
    watch = threading.Timer(longest, _settle_once, (result, lambda: [((0, len(call)), blocked)]))
    watch.daemon = True
    watch.start()
    result.add_done_callback(lambda _: watch.cancel())
    loop.start(_run_async(reward, call, limit)).add_done_callback(lambda done: _settle_once(result, done.result))
    return result


def _settle_once(result: "Future[Attempts]", work: Callable[[], Attempts]) -> None:
    if not result.done():
        settle(result, work)


async def _run_async(reward: Reward, call: RewardCall, limit: float) -> Attempts:
    outcome = await _attempt_async(reward, call, limit)
    groups = call.groups()
    if not isinstance(outcome, RewardFailure) or len(groups) == 1:
        return [((0, len(call)), outcome)]
    retries = await asyncio.gather(*(_attempt_async(reward, call.part(*bounds), limit) for bounds in groups))
    return list(zip(groups, retries, strict=True))


async def _attempt_async(reward: Reward, call: RewardCall, limit: float) -> RewardOutcome:
    logged, start = RewardLogger(reward.name, len(call)), time.perf_counter()
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            returned = await reward.function(**reward.takes.arguments(call), **logged.functions(reward.takes.logs))
    except (Exception, SystemExit) as error:  # foreign code
        seconds = time.perf_counter() - start
        if scope.expired():
            return RewardFailure("timed out", f"it took longer than {limit:g} seconds", seconds)
        return failed(error, seconds)
    return logged.answer(returned, time.perf_counter() - start)
