"""What an environment is to the loop that plays it: it opens, replies to turns, says how it went, and closes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None  # what was wrong with how it was written; the name and arguments are then what was read
    id: str | None = None


@dataclass(frozen=True)
class Opening:
    """What stands before the policy's first turn."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {name, description, parameters}}


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn."""

    text: str  # all of it, special tokens left out
    content: str  # what is left without the tool calls
    calls: Sequence[ToolCall]
    finished: bool  # ended by itself, not by a limit


@dataclass(frozen=True)
class Reply:
    """What the policy reads next; no messages: the episode is over."""

    messages: Sequence[Message] = ()
    failed: int = 0  # calls of the turn that went wrong


@dataclass(frozen=True)
class Outcome:
    """How an episode went."""

    rewards: Mapping[str, float] = field(default_factory=dict)  # by name; empty: the environment gives none
    failure: str | None = None  # the environment broke: nothing is to be learned from this sample
    details: Mapping[str, Any] = field(default_factory=dict)  # columns of the completions file


def opening_messages(prompt: Any, text: str = "") -> list[Message]:
    """A prompt's messages, and text behind them: in the user's last message where there is one."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
    if not text:
        return messages
    if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
        written = messages[-1]["content"]
        return [*messages[:-1], {**messages[-1], "content": f"{written}\n\n{text}" if written else text}]
    return [*messages, {"role": "user", "content": text}]


class Episode(Protocol):
    """One rollout in an environment. A fault of the environment is raised, and masks the sample."""

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a data row; its `prompt` is what the user wrote."""
        ...

    async def reply(self, turn: Turn) -> Reply:
        """Act on a turn."""
        ...

    async def outcome(self) -> Outcome:
        """The rewards, after the last turn: the episode is over, or a limit was reached."""
        ...

    async def close(self) -> None:
        """Give back connections; called once, whatever happened."""
        ...


class Environment(Protocol):
    """Opens episodes; one object for a run."""

    @property
    def reward_names(self) -> Sequence[str]:
        """Names that outcomes may carry."""
        ...

    def episode(self) -> Episode:
        """A new one, not yet open."""
        ...

    async def start(self) -> None:
        """Before the first episode: servers are there and answer."""
        ...

    async def stop(self) -> None:
        """After the last."""
        ...
