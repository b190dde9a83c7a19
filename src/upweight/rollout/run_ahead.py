"""Produces rollouts before the trainer needs them, in the order of submission."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from upweight.rollout.plan import Plan
from upweight.rollout.rollout import Rollout


def lag_bound(plan: Plan, depth: int, sync_interval: int) -> int:
    """Return by how many optimizer steps the trained policy can be ahead of the one that sampled a completion."""
    return depth * plan.steps_per_pass + plan.steps_per_rollout - 1 + sync_interval - 1


def bounded_depth(plan: Plan, depth: int, sync_interval: int, max_staleness: int | None) -> int:
    """Return how many rollouts may be produced ahead without samples growing older than `max_staleness`."""
    while depth and max_staleness is not None and lag_bound(plan, depth, sync_interval) > max_staleness:
        depth -= 1
    return depth


class RunAhead:
    """A queue of rollouts, produced in a thread while the trainer works, or else at once in `submit`."""

    def __init__(self, produce: Callable[[Any], Rollout], *, threaded: bool) -> None:
        self._produce = produce
        self._pool = ThreadPoolExecutor(1, "rollouts") if threaded else None
        self._pending: deque[Future[Rollout]] = deque()
        self.blocked = 0.0  # seconds that the trainer has waited in total
        self._busy = 0.0  # seconds spent on producing rollouts
        self._ready: dict[int, float] = {}  # when each rollout was finished, by its number
        self._last: tuple[float, float, float] | None = None  # time of the last take; `blocked` and `_busy` then

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, trainer_state: Any) -> None:
        """Start the production of one more rollout."""
        if self._pool is not None:
            self._pending.append(self._pool.submit(self._timed_rollout, trainer_state))
        else:
            began = time.perf_counter()
            self._pending.append(_completed_future(self._timed_rollout(trainer_state)))
            self.blocked += time.perf_counter() - began

    def take(self, trainer_state: Any) -> Rollout:
        """Return the oldest rollout with metrics of the waiting times; start one where none is pending."""
        if not self._pending:
            self.submit(trainer_state)
        began = time.perf_counter()
        rollout = self._pending.popleft().result()
        now = time.perf_counter()
        self.blocked += now - began
        rollout.metrics["rollout/queued_seconds"] = began - min(self._ready.pop(rollout.number, began), began)
        if self._last is not None:
            then, blocked, busy = self._last
            span = now - then
            rollout.metrics["rollout/trainer_idle"] = min((self.blocked - blocked) / span, 1.0)
            rollout.metrics["rollout/sampler_idle"] = max(1 - (self._busy - busy) / span, 0.0)
        self._last = now, self.blocked, self._busy
        return rollout

    def wait(self) -> list[Rollout]:
        """Wait for all pending rollouts and return them; they stay in the queue."""
        return [future.result() for future in self._pending]

    def replace(self, rollouts: Iterable[Rollout]) -> None:
        """Queue finished rollouts in place of all that is pending; return when none is being produced any more."""
        wait([future for future in self._pending if not future.cancel()])
        self._pending = deque(_completed_future(rollout) for rollout in rollouts)

    def _timed_rollout(self, trainer_state: Any) -> Rollout:
        began = time.perf_counter()
        rollout = self._produce(trainer_state)
        self._ready[rollout.number] = time.perf_counter()
        self._busy += self._ready[rollout.number] - began
        return rollout

    def close(self) -> None:
        """Cancel the rollouts that have not started, and wait for the one that has."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _completed_future(rollout: Rollout) -> Future[Rollout]:
    future: Future[Rollout] = Future()
    future.set_result(rollout)
    return future
