"""A rollout, also as plain values: for checkpoints and for people to read."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from upweight.types import Completion, Group

TOKENS = ("prompt_ids", "truth_ids", "ids", "scored")  # columns of a row that say in tokens what others say in text


class PromptRows(Protocol):
    """Prepared data rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Mapping[str, Any]: ...


@dataclass
class Rollout:
    """Scored groups of one rollout over all ranks, and what is to be logged about them."""

    number: int
    version: int  # policy that wrote it
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)


def to_plain(rollout: Rollout) -> dict[str, Any]:
    """A rollout without the data rows, which are found again by their numbers."""
    return {
        "number": rollout.number,
        "version": rollout.version,
        "groups": [group_to_plain(group) for group in rollout.groups],
        "metrics": rollout.metrics,
    }


def from_plain(plain: Mapping[str, Any], rows: PromptRows) -> Rollout:
    """The rollout that `to_plain` was given."""
    groups = [group_from_plain(group, rows) for group in plain["groups"]]
    return Rollout(plain["number"], plain["version"], groups, plain["metrics"])


def group_to_plain(group: Group) -> dict[str, Any]:
    """A group without its data row."""
    return {
        "row": group.number,
        "version": group.version,
        "replayed": group.replayed,
        "prompt_ids": group.prompt_ids,
        "completions": [_completion_to_plain(one) for one in group.completions],
        "rewards": None if group.rewards_SR is None else group.rewards_SR.tolist(),
        "advantages": None if group.advantage_S is None else group.advantage_S.tolist(),
    }


def group_from_plain(plain: Mapping[str, Any], rows: PromptRows) -> Group:
    """The group that `group_to_plain` was given."""
    return Group(
        plain["row"],
        rows[plain["row"]],
        plain["prompt_ids"],
        [_completion_from_plain(completion) for completion in plain["completions"]],
        None if plain["rewards"] is None else torch.tensor(plain["rewards"]),
        None if plain["advantages"] is None else torch.tensor(plain["advantages"]),
        version=plain["version"],
        replayed=plain["replayed"],
    )


def _completion_to_plain(completion: Completion) -> dict[str, Any]:
    return {**vars(completion), "earlier": [_completion_to_plain(one) for one in completion.earlier]}


def _completion_from_plain(plain: Mapping[str, Any]) -> Completion:
    earlier = [_completion_from_plain(one) for one in plain.get("earlier", ())]
    return Completion(**{**plain, "earlier": earlier})


def _said(completion: Completion, decode: Callable[[list[int]], str]) -> Any:
    """What a completion says: the conversation, where there is one."""
    if completion.messages is not None:
        return completion.messages
    return decode(completion.written) if completion.text is None else completion.text


def readable(rollout: Rollout, names: Sequence[str], decode: Callable[[list[int]], str]) -> Iterator[dict[str, Any]]:
    """One flat object for each completion: the columns of its row, text, rewards, advantage."""
    for group in rollout.groups:
        rewards = [] if group.rewards_SR is None else group.rewards_SR.tolist()
        advantages = [] if group.advantage_S is None else group.advantage_S.tolist()
        for place, one in enumerate(group.completions):
            yield {
                **{name: value for name, value in group.row.items() if name not in TOKENS},
                "rollout": rollout.number,
                "version": rollout.version,
                "row": group.number,
                "prompt": group.row.get("prompt", decode(group.prompt_ids)),
                "completion": _said(one, decode),
                "tokens": len(one.written),
                "finished": one.finished,
                "rewards": {name: _number(value) for name, value in zip(names, rewards[place], strict=True)},
                "advantage": advantages[place] if advantages else None,
                **{name: values[place] for name, values in group.extras.items()},
                **({} if one.failure is None else {"failure": one.failure}),
            }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
