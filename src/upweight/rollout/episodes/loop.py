"""Runs one episode from its opening to its reward, within limits."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from upweight.data.images.records import image_refs, open_images
from upweight.data.images.row_images import RowImages
from upweight.data.raw_row import RowError
from upweight.data.tokenize.templates import ChatTemplate
from upweight.data.tokenize.tokens import TextTokens
from upweight.environments.call_formats import parse_calls
from upweight.environments.episode import Environment, Episode, EpisodeOutcome, Message, Opening, Turn
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rollout.episodes.chat_tokens import ChatTokens, FollowUp
from upweight.rollout.episodes.images import EpisodeImages, without_pixels
from upweight.rollout.episodes.token_stream import TokenStream
from upweight.rollout.episodes.turn_batcher import FirstTurnBatcher, TurnBatcher
from upweight.types import Completion
from upweight.user_modules import describe_error

T = TypeVar("T")


class EnvironmentFault(Exception):
    """An environment failed or took too long."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_turns: int = 10
    call_seconds: float = 60.0  # for one call of the environment
    episode_seconds: float = 600.0  # for all calls of the environment
    wait_seconds: float = 0.0  # more for the first call, which may have to wait for a free session


@dataclass
class EpisodeSetup:
    """What all episodes of a run share: the environment, their limits, and how turns are rendered and parsed."""

    environment: Environment
    template: ChatTemplate
    ends: frozenset[int]  # tokens that end a turn
    limits: EpisodeLimits
    tool_format: str = "hermes"
    default_system: str | None = None
    images: RowImages | None = None  # reads those that messages hold; None: the model reads none
    image_problem: str | None = None  # why they cannot be trained on

    def __post_init__(self) -> None:
        self.tokenizer = self.template.tokenizer
        self.tokens = TextTokens(self.tokenizer, ())

    def read(self, completion: Completion, *, tools: bool) -> Turn:
        """Parse a sampled turn into its text and its tool calls."""
        ids = completion.ids[:-1] if completion.ids and completion.ids[-1] in self.ends else completion.ids
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        if not tools:
            return Turn(text, text, (), completion.finished)
        content, calls = parse_calls(str(self.tokenizer.decode(ids, skip_special_tokens=False)), self.tool_format)
        for token in filter(None, self.tokenizer.all_special_tokens):
            content = content.replace(token, "")
        return Turn(text, content if calls else text, calls, completion.finished)


@dataclass
class EpisodeResult:
    """The tokens, messages, counts and outcome of an episode."""

    stream: TokenStream | None = None
    messages: list[Message] = field(default_factory=list)  # after the prompt
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    seconds: float = 0.0  # in the environment
    finished: bool = False  # ended by itself, not by a limit
    outcome: EpisodeOutcome = field(default_factory=EpisodeOutcome)
    failure: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the `episode` column, which rewards, metrics and the completions file read."""
        return {
            "turns": self.turns,
            "tool_calls": self.calls,
            "tool_failures": self.failed_calls,
            "seconds": round(self.seconds, 3),
            "splits": 0 if self.stream is None else len(self.stream.segments) - 1,
            "rewards": dict(self.outcome.rewards),
        }


@dataclass
class EpisodeRun:
    """An episode while it runs."""

    setup: EpisodeSetup
    batcher: TurnBatcher
    first_turns: FirstTurnBatcher
    seed: Callable[[int], int]  # by the number of the turn
    result: EpisodeResult = field(default_factory=EpisodeResult)

    async def play(self, row: Mapping[str, Any]) -> EpisodeResult:
        """Run an episode for a data row; a fault of the environment is noted in the result, other errors are raised."""
        episode = self.setup.environment.episode()
        try:
            await self._play(episode, row)
        except (EnvironmentFault, RowError) as error:
            self.result.failure = str(error)
            warn_once(f"an environment failed, and its sample is left out (environment/masked counts them): {error}")
        finally:
            if self.result.stream is None:
                self.first_turns.count_episode()
            try:
                await _with_time_limit("close", episode.close(), self.setup.limits.call_seconds)
            except EnvironmentFault as error:
                warn_once(f"an environment did not close: {error}")
        return self.result

    async def _open(
        self, episode: Episode, row: Mapping[str, Any], images: EpisodeImages
    ) -> tuple[Opening, ChatTokens, FollowUp]:
        """Open an episode; return what its environment says, the conversation, and the tokens of its prompt."""
        setup = self.setup
        refs = () if setup.images is None else image_refs(row)
        shown = {**row, "images": open_images(refs)} if refs else row
        opening = await self._call_environment("open", episode.open(shown), setup.limits.wait_seconds)
        messages = list(opening.messages)
        if setup.default_system is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": setup.default_system}, *messages]
        marked = images.opening(messages, refs)
        chat = ChatTokens(setup.template, setup.tokens, setup.ends, marked, opening.tools, loaded=images.loaded)
        as_in_data = not opening.tools and messages == row.get("prompt")  # the environment adds nothing to it
        start = FollowUp(list(row["prompt_ids"]), restarts=True, images=refs) if as_in_data else chat.opening()
        return opening, chat, start

    async def _play(self, episode: Episode, row: Mapping[str, Any]) -> None:
        setup, result, limits = self.setup, self.result, self.setup.limits
        images = EpisodeImages(setup.images, setup.image_problem)
        opening, chat, start = await self._open(episode, row, images)
        prompt, limit = start.ids, self.batcher.sampling.max_new_tokens
        try:
            self.batcher.generator.require_room(len(prompt), limit)
        except UserError as error:
            raise EnvironmentFault(str(error)) from error
        stream = result.stream = TokenStream(prompt, None if setup.images is None else start.images)
        while True:
            tokens_left, seed = limit - stream.length, self.seed(result.turns)
            if result.turns == 0:
                completion = await self.first_turns.sample(stream.ids, tokens_left, seed, stream.images)
            else:
                (completion,) = await self.batcher.sample(stream.ids, tokens_left, [seed], stream.images)
            stream.append_sampled(completion)
            turn = setup.read(completion, tools=bool(opening.tools))
            message = _assistant_message(turn)
            result.messages.append(message)
            result.turns += 1
            result.calls += len(turn.calls)
            reply = await self._call_environment("reply", episode.reply(turn))
            result.failed_calls += reply.failed
            result.messages += without_pixels(reply.messages)
            if not reply.messages:
                result.finished = turn.finished
                break
            if result.turns >= limits.max_turns or stream.length >= limit:
                break
            last_id = completion.ids[-1] if completion.ids else None
            follow_up = chat.follow(turn.text, last_id, message.get("tool_calls") or (), images.marked(reply.messages))
            length = len(follow_up.ids) + (0 if follow_up.restarts else len(stream.ids))
            if length >= limit + len(prompt):
                break
            if follow_up.restarts:
                stream.restart(follow_up.ids, None if setup.images is None else follow_up.images)
            else:
                stream.append_observation(follow_up.ids, follow_up.images)
        result.outcome = await self._call_environment("outcome", episode.outcome())
        if result.outcome.failure is not None:
            raise EnvironmentFault(result.outcome.failure)

    async def _call_environment(self, what: str, work: Awaitable[T], more: float = 0.0) -> T:
        """Return the environment's answer, within the time that remains for this episode."""
        limits, began = self.setup.limits, time.monotonic()
        remaining = max(limits.episode_seconds - self.result.seconds, 0.0)
        try:
            return await _with_time_limit(what, work, min(limits.call_seconds, remaining) + more)
        finally:
            self.result.seconds += time.monotonic() - began


async def _with_time_limit(what: str, work: Awaitable[T], limit: float) -> T:
    """Return what some work returns; raise an EnvironmentFault where it fails or exceeds the time limit."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit)
        is_late = not task.done()
    finally:
        task.cancel()  # does nothing to one that is done
    if is_late:
        raise EnvironmentFault(f"{what}: it took longer than {limit:g} seconds")
    if task.cancelled():
        raise EnvironmentFault(f"{what}: it was cancelled")
    error = task.exception()
    if isinstance(error, UserError):
        raise error
    if error is not None:
        raise EnvironmentFault(f"{what}: {describe_error(error)}") from error
    return task.result()


def _assistant_message(turn: Turn) -> dict[str, Any]:
    """Return a turn as an assistant message; it keeps the raw text where a call could not be parsed."""
    calls = [call for call in turn.calls if call.error is None]
    all_parsed = len(calls) == len(turn.calls)
    message: dict[str, Any] = {"role": "assistant", "content": turn.content if all_parsed else turn.text}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            | ({"id": call.id} if call.id else {})
            for call in calls
        ]
    return message
