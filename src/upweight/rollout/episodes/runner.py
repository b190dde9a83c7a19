"""Completions by playing an environment: many episodes at once, each a conversation with what answers the policy."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from upweight.environments.episode import Environment
from upweight.event_loop import EventLoop
from upweight.rollout.episodes.loop import EpisodeResult, EpisodeSetup, play
from upweight.rollout.episodes.token_stream import completion_of, shared_prompt
from upweight.rollout.episodes.turn_batcher import FirstTurnBatcher, TurnBatcher
from upweight.types import Completion, Generator, Group, Sampling

STOPPING = 60.0  # seconds for an environment to stop, which may have to end servers
ENDING = 10.0  # seconds for episodes to close when a rollout is given up


@dataclass
class EnvironmentLoop:
    """A loop on which an environment is started when it is first asked for."""

    environment: Environment
    _loop: EventLoop | None = field(default=None, init=False)

    def running(self) -> EventLoop:
        """The loop, with the environment started."""
        if self._loop is None:
            self._loop = EventLoop("episodes")
            self._loop.start(self.environment.start()).result()
        return self._loop

    def close(self) -> None:
        """Stop the environment; a later call starts it anew."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with contextlib.suppress(TimeoutError):
                loop.start(self.environment.stop()).result(STOPPING)
            loop.close()


@dataclass
class EpisodeRunner:
    """Fills groups by playing. Episodes run on a loop of their own, the policy samples in the caller's thread."""

    setup: EpisodeSetup
    generator: Generator | None  # None where another process samples

    def __post_init__(self) -> None:
        self._loop = EnvironmentLoop(self.setup.environment)

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        assert self.generator is not None, "this process does not sample"
        loop = self._loop.running()
        turns = TurnBatcher(self.generator, sampling, under_way=len(groups) * count)
        # The first error that is no environment's fault ends all.
        playing = together(self._group(place, group, count, turns) for place, group in enumerate(groups))
        task = loop.start(_as_task(playing)).result()
        over: Future[None] = Future()
        task.add_done_callback(lambda _: over.set_result(None))
        over.add_done_callback(lambda _: turns.end())
        try:
            turns.serve(done)
        finally:
            task.get_loop().call_soon_threadsafe(task.cancel)
            wait([over], timeout=ENDING)
        task.result()

    def close(self) -> None:
        """Stop the environment; a later call starts it anew."""
        self._loop.close()

    async def _group(self, place: int, group: Group, count: int, turns: TurnBatcher) -> None:
        first = FirstTurnBatcher(turns, count)
        sampling = turns.sampling

        def seed(member: int, turn: int) -> int:
            entropy = (sampling.seed or 0, sampling.first + place, member, turn)
            return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

        async def one(member: int) -> EpisodeResult:
            try:
                return await play(self.setup, group.row, turns, first, lambda turn: seed(member, turn))
            finally:
                turns.over()

        try:
            fill(group, await together(one(member) for member in range(count)))
        finally:
            first.end()
        turns.over(place)


def fill(group: Group, played: Sequence[EpisodeResult]) -> None:
    """Put played episodes into their group: what they all were given is its prompt."""
    streams = [one.stream for one in played if one.stream is not None and one.failure is None]
    if streams:
        group.prompt_ids = shared_prompt(streams)
    group.completions = [_completion(one, group) for one in played]
    group.extras["episode"] = [one.record() for one in played]
    for name in dict.fromkeys(name for one in played for name in one.outcome.details):
        group.extras[name] = [one.outcome.details.get(name) for one in played]


def _completion(played: EpisodeResult, group: Group) -> Completion:
    messages = list(played.messages)
    if played.failure is not None or played.stream is None:
        reason = played.failure or "no turn was played"
        return Completion([], [], [], finished=False, sampled=[], messages=messages, failure=reason)
    return replace(completion_of(played.stream, group, finished=played.finished), messages=messages)


async def together(work: Any) -> list[Any]:
    """Results in order; where one fails the rest is cancelled and waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _as_task(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return asyncio.ensure_future(work)
