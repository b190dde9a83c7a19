"""Turns of many episodes, sampled together: whoever waits for the policy, in one call of the backend."""

import asyncio
import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from upweight.errors import UserError
from upweight.types import Completion, Generator, Sampling

SHARE = 0.25  # of the last call's time that turns which are ready wait for those that are not
LATE = 1.0  # seconds that the first turn of open episodes waits for others of its group to open
SHORTEST, LONGEST = 0.005, 1.0  # seconds of that wait


@dataclass(frozen=True)
class _PendingTurn:
    """One prompt, how many tokens may follow it, and a seed for each completion."""

    prompt: Sequence[int]
    limit: int
    seeds: Sequence[int]
    answer: "Future[list[Completion]]" = field(default_factory=Future)


class _End:
    """Nothing more will come."""


@dataclass
class TurnBatcher:
    """Between episodes, on an event loop, and a backend, in the thread that calls `serve`.

    A backend with `start` (a server) gets each turn when it comes; any other gets all that are ready at a time.
    """

    generator: Generator
    sampling: Sampling
    under_way: int = 0  # episodes that are not over
    patience: float = SHORTEST
    _events: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)

    async def sample(self, prompt: Sequence[int], limit: int, seeds: Sequence[int]) -> list[Completion]:
        """One completion for each seed; called on the loop."""
        start = getattr(self.generator, "start", None)
        if start is not None:
            sampling = dataclasses.replace(self.sampling, max_new_tokens=limit)
            return await asyncio.wrap_future(start(prompt, len(seeds), sampling))
        asked = _PendingTurn(prompt, limit, seeds)
        self._events.put(asked)
        return await asyncio.wrap_future(asked.answer)

    def over(self, place: int | None = None) -> None:
        """An episode, or all of the group at `place`, is over."""
        self.under_way -= place is None
        self._events.put(place)

    def end(self) -> None:
        """All of them are."""
        self._events.put(_End())

    def serve(self, done: Callable[[int], None] | None) -> None:
        """Sample until the end; `done` hears of groups."""
        asked: list[_PendingTurn] = []
        since = 0.0
        while True:
            left = max(since + self.patience - time.monotonic(), 0.0) if asked else None
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                event = None
            if isinstance(event, _End):
                return
            if isinstance(event, _PendingTurn):
                since = since if asked else time.monotonic()
                asked.append(event)
            elif event is not None and done is not None:
                done(event)
            late = bool(asked) and self._events.empty() and time.monotonic() >= since + self.patience
            if asked and (late or sum(len(one.seeds) for one in asked) >= self.under_way):
                self._generate(asked)
                asked = []

    def _generate(self, asked: Sequence[_PendingTurn]) -> None:
        began = time.monotonic()
        by_count: dict[int, list[_PendingTurn]] = {}
        for one in asked:
            if one.answer.set_running_or_notify_cancel():  # nobody waits any more where the rollout was given up
                by_count.setdefault(len(one.seeds), []).append(one)
        for together in (part for alike in by_count.values() for part in self._parts(alike)):
            sampling = dataclasses.replace(
                self.sampling,
                max_new_tokens=max(one.limit for one in together),
                seeds=tuple(seed for one in together for seed in one.seeds),
            )
            found = self.generator.generate([one.prompt for one in together], len(together[0].seeds), sampling)
            for one, completions in zip(together, found, strict=True):
                one.answer.set_result([_within(completion, one.limit) for completion in completions])
        self.patience = min(max(SHARE * (time.monotonic() - began), SHORTEST), LONGEST)

    def _parts(self, asked: Sequence[_PendingTurn]) -> list[list[_PendingTurn]]:
        """Requests that one call has room for: the longest prompt of each part with the largest limit in it."""
        parts: list[list[_PendingTurn]] = []
        for one in sorted(asked, key=lambda one: one.limit, reverse=True):
            longest = max((len(other.prompt) for other in parts[-1]), default=0) if parts else 0
            if parts and self._fits(max(longest, len(one.prompt)), parts[-1][0].limit):
                parts[-1].append(one)
            else:
                parts.append([one])
        return parts

    def _fits(self, prompt: int, new: int) -> bool:
        try:
            self.generator.require_room(prompt, new)
        except UserError:
            return False
        return True


class FirstTurnBatcher:
    """The first turn of a group: asked for once all its episodes are open, once for those that begin alike.

    Where an environment has no room for all at once, those that are open do not wait for the rest.
    """

    def __init__(self, turns: TurnBatcher, episodes: int) -> None:
        self._turns, self._left = turns, episodes
        self._asked: dict[tuple[int, ...], list[tuple[int, int, asyncio.Future[Completion]]]] = {}
        self._work: list[asyncio.Task[None]] = []
        self._late: asyncio.TimerHandle | None = None

    async def sample(self, prompt: Sequence[int], limit: int, seed: int) -> Completion:
        """This episode's first turn."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(tuple(prompt), []).append((seed, limit, answer))
        self.one_less()
        return await answer

    def one_less(self) -> None:
        """One episode of the group has asked, or never will."""
        self._left -= 1
        if self._late is not None:
            self._late.cancel()
        if self._left == 0:
            self._ask_all()
        else:
            self._late = asyncio.get_running_loop().call_later(LATE, self._ask_all)

    def _ask_all(self) -> None:
        """Ask for those that are open."""
        asked, self._asked = self._asked, {}
        self._work += [asyncio.ensure_future(self._ask(*one)) for one in asked.items()]

    def end(self) -> None:
        """Nobody waits any more."""
        for task in self._work:
            task.cancel()

    async def _ask(
        self, prompt: tuple[int, ...], asking: Sequence[tuple[int, int, "asyncio.Future[Completion]"]]
    ) -> None:
        answers = [answer for _, _, answer in asking]
        try:
            found = await self._turns.sample(prompt, asking[0][1], [seed for seed, _, _ in asking])
        except Exception as error:  # handed to those who wait
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, completion in zip(answers, found, strict=True):
            if not answer.done():
                answer.set_result(completion)


def _within(completion: Completion, limit: int) -> Completion:
    """A completion cut to the tokens that its own episode has left."""
    if len(completion.ids) <= limit:
        return completion
    return dataclasses.replace(
        completion,
        ids=completion.ids[:limit],
        logps=completion.logps[:limit],
        versions=completion.versions[:limit],
        finished=False,
    )
