"""Completions from an environment: many episodes at once, each a conversation with the policy."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from upweight.environments.episode import Environment
from upweight.event_loop import EventLoop
from upweight.rollout.episodes.loop import EpisodeResult, EpisodeRun, EpisodeSetup
from upweight.rollout.episodes.token_stream import build_completion, shared_prompt
from upweight.rollout.episodes.turn_batcher import FirstTurnBatcher, TurnBatcher
from upweight.types import Completion, Generator, Group, GroupDone, Sampling

T = TypeVar("T")
STOP_SECONDS = 60.0  # for an environment to stop, which may have to end servers
CANCEL_TIMEOUT = 10.0  # for episodes to close when a rollout is cancelled


@dataclass
class EnvironmentLoop:
    """An event loop on which an environment is started at first use."""

    environment: Environment
    _loop: EventLoop | None = field(default=None, init=False)

    def started(self) -> EventLoop:
        """Return the loop, with the environment started."""
        if self._loop is None:
            self._loop = EventLoop("episodes")
            try:
                self._loop.start(self.environment.start()).result()
            except BaseException:
                self.close()  # so that the next call starts it again
                raise
        return self._loop

    def close(self) -> None:
        """Stop the environment; a later call starts it again."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with contextlib.suppress(TimeoutError):
                loop.start(self.environment.stop()).result(STOP_SECONDS)
            loop.close()


@dataclass
class EpisodeRunner:
    """Fills groups by running episodes on an event loop, while the policy samples in the caller's thread."""

    setup: EpisodeSetup
    generator: Generator | None  # None where another process samples

    def __post_init__(self) -> None:
        self._loop = EnvironmentLoop(self.setup.environment)

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        assert self.generator is not None, "this process does not sample"
        loop = self._loop.started()
        batcher = TurnBatcher(self.generator, sampling, active=len(groups) * count)
        # The first error that is no environment's fault ends all episodes.
        work = gather_or_cancel(self._play_group(index, group, count, batcher) for index, group in enumerate(groups))
        ended: Future[None] = Future()
        ended.add_done_callback(lambda _: batcher.end())
        task = loop.start(_as_task(work, ended)).result()
        try:
            batcher.serve(done)
        finally:
            task.get_loop().call_soon_threadsafe(task.cancel)
            wait([ended], timeout=CANCEL_TIMEOUT)
        task.result()

    def close(self) -> None:
        """Stop the environment; a later call starts it again."""
        self._loop.close()

    async def _play_group(self, index: int, group: Group, count: int, batcher: TurnBatcher) -> None:
        first_turns = FirstTurnBatcher(batcher, count)
        sampling = batcher.sampling

        def seed(member: int, turn: int) -> int:
            entropy = (sampling.seed or 0, sampling.first + index, member, turn)
            return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

        async def play(member: int) -> EpisodeResult:
            try:
                return await EpisodeRun(self.setup, batcher, first_turns, partial(seed, member)).play(group.row)
            finally:
                batcher.end_episode()

        try:
            fill_group(group, await gather_or_cancel(play(member) for member in range(count)))
        finally:
            first_turns.cancel()
        batcher.end_group(index)


def fill_group(group: Group, results: Sequence[EpisodeResult]) -> None:
    """Put the results of episodes into their group; what all episodes begin with becomes its prompt."""
    streams = [result.stream for result in results if result.stream is not None and result.failure is None]
    if streams:
        group.prompt_ids = shared_prompt(streams)
    group.completions = []
    for result in results:
        if result.failure is not None or result.stream is None:
            failure = result.failure or "the episode had no turn"
            completion = Completion([], [], [], finished=False, sampled=[], failure=failure)
        else:
            completion = build_completion(result.stream, group, finished=result.finished)
        group.completions.append(replace(completion, messages=list(result.messages)))
    group.environments = [result.outcome.environment for result in results]
    group.extras["episode"] = [result.record() for result in results]
    for name in dict.fromkeys(name for result in results for name in result.outcome.details):
        group.extras[name] = [result.outcome.details.get(name) for result in results]


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; where one fails, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _as_task(work: Coroutine[Any, Any, Any], ended: "Future[None]") -> "asyncio.Task[Any]":
    """Start the work on this loop, which alone may add a callback: from another thread it would not wake up for it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: ended.set_result(None))
    return task
