"""One episode from its opening to its reward, within bounds."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from upweight.data.raw_row import RowError
from upweight.data.tokenize.templates import ChatTemplate
from upweight.data.tokenize.tokens import TextTokens
from upweight.environments.call_formats import parse_calls
from upweight.environments.episode import Environment, Episode, Message, Outcome, Turn
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rewards.answers import described
from upweight.rollout.episodes.chat_tokens import ChatTokens
from upweight.rollout.episodes.token_stream import TokenStream
from upweight.rollout.episodes.turn_batcher import FirstTurnBatcher, TurnBatcher
from upweight.types import Completion

T = TypeVar("T")


class Fault(Exception):
    """An environment broke, or took too long."""


@dataclass(frozen=True)
class Bounds:
    """How far an episode may go."""

    max_turns: int = 10
    call_seconds: float = 60.0  # for one call of the environment
    episode_seconds: float = 600.0  # for all its calls together
    wait_seconds: float = 0.0  # more for the first, where a place in the environment may have to be waited for


@dataclass
class EpisodeSetup:
    """What the episodes of a run have in common: the environment, how far they go, and how turns are written."""

    environment: Environment
    template: ChatTemplate
    ends: frozenset[int]  # tokens that end a turn
    bounds: Bounds
    tool_format: str = "hermes"
    default_system: str | None = None

    def __post_init__(self) -> None:
        self.tokenizer = self.template.tokenizer
        self.tokens = TextTokens(self.tokenizer, ())
        self._marks = [mark for mark in self.tokenizer.all_special_tokens if mark]

    def read(self, completion: Completion, *, tools: bool) -> Turn:
        """What the policy wrote in a turn."""
        ids = completion.ids[:-1] if completion.ids and completion.ids[-1] in self.ends else completion.ids
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        if not tools:
            return Turn(text, text, (), completion.finished)
        content, calls = parse_calls(str(self.tokenizer.decode(ids, skip_special_tokens=False)), self.tool_format)
        for mark in self._marks:
            content = content.replace(mark, "")
        return Turn(text, content if calls else text, calls, completion.finished)


@dataclass
class EpisodeResult:
    """What came of an episode."""

    stream: TokenStream | None = None
    messages: list[Message] = field(default_factory=list)  # after the prompt
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    seconds: float = 0.0  # in the environment
    finished: bool = False  # ended by itself, not by a limit
    outcome: Outcome = field(default_factory=Outcome)
    failure: str | None = None

    def record(self) -> dict[str, Any]:
        """What rewards, metrics and people may want to know about it."""
        return {
            "turns": self.turns,
            "tool_calls": self.calls,
            "tool_failures": self.failed_calls,
            "seconds": round(self.seconds, 3),
            "splits": 0 if self.stream is None else len(self.stream.stretches) - 1,
            "rewards": dict(self.outcome.rewards),
        }


async def play(
    setup: EpisodeSetup, row: Mapping[str, Any], turns: TurnBatcher, first: FirstTurnBatcher, seed: Callable[[int], int]
) -> EpisodeResult:
    """An episode for a data row; a fault of the environment is noted in it, any other error is raised."""
    episode, played = setup.environment.episode(), EpisodeResult()
    game = _EpisodeRun(setup, episode, played, turns, first, seed)
    try:
        await game.run(row)
    except (Fault, RowError) as error:
        played.failure = str(error)
        warn_once(f"an environment failed, and its sample is left out (environment/masked counts them): {error}")
    finally:
        if not game.asked:
            first.one_less()
        await game.closed()
    return played


@dataclass
class _EpisodeRun:
    """The moves of an episode."""

    setup: EpisodeSetup
    episode: Episode
    played: EpisodeResult
    turns: TurnBatcher
    first: FirstTurnBatcher
    seed: Callable[[int], int]
    asked: bool = False  # for the first turn

    async def run(self, row: Mapping[str, Any]) -> None:
        setup, played, bounds = self.setup, self.played, self.setup.bounds
        opening = await self._call("open", self.episode.open(row), bounds.wait_seconds)
        messages = _with_system(list(opening.messages), setup.default_system)
        dialogue = ChatTokens(setup.template, setup.tokens, setup.ends, messages, opening.tools)
        as_in_data = not opening.tools and messages == row.get("prompt")  # the environment adds nothing to it
        prompt = list(row["prompt_ids"]) if as_in_data else dialogue.opening()
        limit = self.turns.sampling.max_new_tokens
        self._require_room(len(prompt), limit)
        stream = played.stream = TokenStream(prompt)
        while True:
            answer = await self._sample(stream.ids, limit - stream.length)
            stream.wrote(answer)
            turn = setup.read(answer, tools=bool(opening.tools))
            said = _message(turn)
            played.messages.append(said)
            played.turns += 1
            played.calls += len(turn.calls)
            reply = await self._call("reply", self.episode.reply(turn))
            played.failed_calls += reply.failed
            played.messages += reply.messages
            if not reply.messages:
                played.finished = turn.finished
                break
            if played.turns >= bounds.max_turns or stream.length >= limit:
                break
            last = answer.ids[-1] if answer.ids else None
            told = dialogue.follow(turn.text, last, said.get("tool_calls") or (), reply.messages)
            room = limit + len(prompt) - (len(told.ids) if told.anew else len(stream.ids) + len(told.ids))
            if room < 1:
                break
            (stream.restart if told.anew else stream.told)(told.ids)
        played.outcome = await self._call("outcome", self.episode.outcome())
        if played.outcome.failure is not None:
            raise Fault(played.outcome.failure)

    async def closed(self) -> None:
        """Close the episode; that it does not close well spoils nothing."""
        try:
            await _limited("close", self.episode.close(), self.setup.bounds.call_seconds)
        except Fault as error:
            warn_once(f"an environment did not close: {error}")

    async def _sample(self, prompt: Sequence[int], room: int) -> Completion:
        number = self.played.turns
        if number == 0:
            self.asked = True
            return await self.first.sample(prompt, room, self.seed(0))
        return (await self.turns.sample(prompt, room, [self.seed(number)]))[0]

    async def _call(self, what: str, work: Awaitable[T], more: float = 0.0) -> T:
        """An answer of the environment, within the time that this episode has left."""
        bounds, began = self.setup.bounds, time.monotonic()
        left = max(bounds.episode_seconds - self.played.seconds, 0.0)
        try:
            return await _limited(what, work, min(bounds.call_seconds, left) + more)
        finally:
            self.played.seconds += time.monotonic() - began

    def _require_room(self, prompt: int, new: int) -> None:
        try:
            self.turns.generator.require_room(prompt, new)
        except UserError as error:
            raise Fault(str(error)) from error


async def _limited(what: str, work: Awaitable[T], limit: float) -> T:
    """What some work gives; a Fault where it fails, or takes too long: it is then left to itself."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise Fault(f"{what}: it took longer than {limit:g} seconds")
    if task.cancelled():
        raise Fault(f"{what}: it was cancelled")
    error = task.exception()
    if isinstance(error, UserError):
        raise error
    if error is not None:
        raise Fault(f"{what}: {described(error)}") from error
    return task.result()


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as people, rewards and templates read it."""
    made = [call for call in turn.calls if call.error is None]
    whole = len(made) == len(turn.calls)
    message: dict[str, Any] = {"role": "assistant", "content": turn.content if whole else turn.text}
    if made:
        message["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id else {}),
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in made
        ]
    return message


def _with_system(messages: list[Message], system: str | None) -> list[Message]:
    if system is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system}, *messages]
