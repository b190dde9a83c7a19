"""Samples the turns of many episodes together: all turns that are ready go into one call of the backend."""

import asyncio
import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from upweight.errors import UserError
from upweight.types import Completion, Generator, ImageRef, Sampling

WaitingTurn = tuple[int, int, "asyncio.Future[Completion]"]  # a seed, a limit, and what the episode waits for
WAIT_SHARE = 0.25  # of the last call's time, for which turns that are ready wait for the others
MIN_WAIT, MAX_WAIT = 0.005, 1.0  # seconds of that wait
OPENING_WAIT = 1.0  # seconds for which the first turn of open episodes waits for the next of its group to open


@dataclass(frozen=True)
class _TurnRequest:
    """A prompt, its limit of new tokens, and a seed for each completion."""

    prompt: Sequence[int]
    limit: int
    seeds: Sequence[int]
    images: tuple[ImageRef, ...] = ()
    completions: "Future[list[Completion]]" = field(default_factory=Future)


@dataclass
class TurnBatcher:
    """Passes turns from episodes, on an event loop, to a backend, in the thread that calls `serve`."""

    # A backend with `start` (a server) gets each turn at once; any other gets all that are ready in one call.

    generator: Generator
    sampling: Sampling
    active: int = 0  # episodes that have not ended
    max_wait: float = MIN_WAIT
    # Requested turns, indices of groups that have ended, None after an episode, and "end" after the last.
    _events: "queue.SimpleQueue[_TurnRequest | int | str | None]" = field(default_factory=queue.SimpleQueue)

    async def sample(
        self, prompt: Sequence[int], limit: int, seeds: Sequence[int], images: tuple[ImageRef, ...] = ()
    ) -> list[Completion]:
        """Return one completion for each seed; called on the event loop."""
        if images and not getattr(self.generator, "reads_images", False):
            raise UserError("environment: images are read by sampling in this process; leave out what else samples.")
        start = getattr(self.generator, "start", None)
        if start is not None:
            sampling = dataclasses.replace(self.sampling, max_new_tokens=limit, images=(images,) if images else ())
            return await asyncio.wrap_future(start(prompt, len(seeds), sampling))
        request = _TurnRequest(prompt, limit, seeds, images)
        self._events.put(request)
        return await asyncio.wrap_future(request.completions)

    def end_episode(self) -> None:
        self.active -= 1
        self._events.put(None)

    def end_group(self, index: int) -> None:
        self._events.put(index)

    def end(self) -> None:
        self._events.put("end")

    def serve(self, done: Callable[[int], None] | None) -> None:
        """Sample requested turns until `end`; call `done` with the index of each group that ends."""
        requests: list[_TurnRequest] = []
        since = 0.0
        while True:
            timeout = max(since + self.max_wait - time.monotonic(), 0.0) if requests else None
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                event = None
            if event == "end":
                return
            if isinstance(event, _TurnRequest):
                since = since if requests else time.monotonic()
                requests.append(event)
            elif isinstance(event, int) and done is not None:
                done(event)
            late = self._events.empty() and time.monotonic() >= since + self.max_wait
            if requests and (late or sum(len(request.seeds) for request in requests) >= self.active):
                self._generate(requests)
                requests = []

    def _generate(self, requests: Sequence[_TurnRequest]) -> None:
        began = time.monotonic()
        by_count: dict[int, list[_TurnRequest]] = {}
        for request in requests:
            if request.completions.set_running_or_notify_cancel():  # cancelled with its rollout otherwise
                by_count.setdefault(len(request.seeds), []).append(request)
        for batch in (batch for same_count in by_count.values() for batch in self._split_to_fit(same_count)):
            images = tuple(request.images for request in batch)
            sampling = dataclasses.replace(
                self.sampling,
                images=images if any(images) else (),
                max_new_tokens=max(request.limit for request in batch),
                seeds=tuple(seed for request in batch for seed in request.seeds),
            )
            by_prompt = self.generator.generate([request.prompt for request in batch], len(batch[0].seeds), sampling)
            for request, completions in zip(batch, by_prompt, strict=True):
                request.completions.set_result([_cut(completion, request.limit) for completion in completions])
        self.max_wait = min(max(WAIT_SHARE * (time.monotonic() - began), MIN_WAIT), MAX_WAIT)

    def _split_to_fit(self, requests: Sequence[_TurnRequest]) -> list[list[_TurnRequest]]:
        """Split requests so that the longest prompt and the largest limit of each batch fit together."""
        batches: list[list[_TurnRequest]] = []
        for request in sorted(requests, key=lambda request: request.limit, reverse=True):
            batch = [*(batches[-1] if batches else ()), request]
            try:
                self.generator.require_room(max(len(member.prompt) for member in batch), batch[0].limit)
                batches[-1:] = [batch]
            except UserError:
                batches.append([request])
        return batches


class FirstTurnBatcher:
    """Samples the first turn of a group once all its episodes are open, in one request for each distinct prompt."""

    # Where an environment cannot open all at once, those that are open do not wait for the rest.

    def __init__(self, batcher: TurnBatcher, episodes: int) -> None:
        self._batcher, self._missing = batcher, episodes
        self._requests: dict[tuple[tuple[int, ...], tuple[ImageRef, ...]], list[WaitingTurn]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def sample(
        self, prompt: Sequence[int], limit: int, seed: int, images: tuple[ImageRef, ...] = ()
    ) -> Completion:
        completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._requests.setdefault((tuple(prompt), images), []).append((seed, limit, completion))
        self.count_episode()
        return await completion

    def count_episode(self) -> None:
        """Count an episode that has requested its first turn, or that ended before it could."""
        self._missing -= 1
        if self._timer is not None:
            self._timer.cancel()
        if self._missing == 0:
            self._start_requests()
        else:
            self._timer = asyncio.get_running_loop().call_later(OPENING_WAIT, self._start_requests)

    def _start_requests(self) -> None:
        requests, self._requests = self._requests, {}
        self._tasks += [asyncio.ensure_future(self._request(*request)) for request in requests.items()]

    def cancel(self) -> None:
        """Cancel the requests that are still running, when no episode waits for them any more."""
        for task in self._tasks:
            task.cancel()

    async def _request(
        self, prompt: tuple[tuple[int, ...], tuple[ImageRef, ...]], waiting: Sequence[WaitingTurn]
    ) -> None:
        ids, images = prompt
        seeds, limits, futures = zip(*waiting, strict=True)
        try:
            completions = await self._batcher.sample(ids, limits[0], seeds, images)
        except Exception as error:  # raised in the episodes that wait
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        for future, completion in zip(futures, completions, strict=True):
            if not future.done():
                future.set_result(completion)


def _cut(completion: Completion, limit: int) -> Completion:
    """Cut a completion to the token limit of its episode."""
    if len(completion.ids) <= limit:
        return completion
    shorter: dict[str, Any] = {name: getattr(completion, name)[:limit] for name in ("ids", "logps", "versions")}
    if completion.routes is not None:  # the prompt's come first
        shorter["routes"] = completion.routes[: limit - len(completion.ids)]
    return dataclasses.replace(completion, **shorter, finished=False)
