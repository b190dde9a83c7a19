"""The interface of environments: an episode opens, replies to turns, reports its outcome, and closes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None  # why it could not be parsed; name and arguments are then incomplete
    id: str | None = None


@dataclass(frozen=True)
class Opening:
    """The messages before the policy's first turn, and the tools."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {name, description, parameters}}


@dataclass(frozen=True)
class Turn:
    """One turn of the policy."""

    text: str  # all of it, without special tokens
    content: str  # the text without the tool calls
    calls: Sequence[ToolCall]
    finished: bool  # ended by an end token, not by a limit


@dataclass(frozen=True)
class Reply:
    """What the policy reads next; no messages end the episode."""

    messages: Sequence[Message] = ()
    failed: int = 0  # number of calls of the turn that failed


@dataclass(frozen=True)
class EpisodeOutcome:
    """The rewards of an episode, or why it failed."""

    rewards: Mapping[str, float] = field(default_factory=dict)  # by name; empty where the environment gives none
    failure: str | None = None  # why the environment failed; the sample is then masked
    details: Mapping[str, Any] = field(default_factory=dict)  # columns of the completions file
    environment: Any = None  # the user's object, for reward functions that take `environments`


class Episode(Protocol):
    """One rollout in an environment, which subclasses define. An error that it raises masks the sample."""

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a data row, whose `prompt` is the user's."""
        ...

    async def reply(self, turn: Turn) -> Reply:
        """Act on a turn of the policy and return what it reads next."""
        ...

    async def outcome(self) -> EpisodeOutcome:
        """Return the rewards after the last turn, which ended the episode or reached a limit."""
        ...

    async def close(self) -> None:
        """Release connections, if there are any; called exactly once."""


class Environment(Protocol):
    """Creates episodes, and is what subclasses define; a run has one environment."""

    @property
    def reward_names(self) -> Sequence[str]:
        """The names of the rewards that outcomes may have."""
        ...

    def episode(self) -> Episode:
        """Return a new episode that is not yet open."""
        ...

    async def start(self) -> None:
        """Prepare for the first episode, as by starting servers or waiting until they answer."""

    async def stop(self) -> None:
        """Release everything after the last episode; servers that the user started run on."""
