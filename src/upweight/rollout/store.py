"""A rollout as plain values, for checkpoints and for people to read."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from upweight.rollout.producer import Rollout, Rows
from upweight.types import Completion, Group


def to_plain(rollout: Rollout) -> dict[str, Any]:
    """A rollout without the data rows, which are found again by their numbers."""
    return {
        "number": rollout.number,
        "version": rollout.version,
        "groups": [
            {
                "row": group.number,
                "prompt_ids": group.prompt_ids,
                "completions": [vars(one) for one in group.completions],
                "rewards": None if group.rewards_SR is None else group.rewards_SR.tolist(),
                "advantages": None if group.advantage_S is None else group.advantage_S.tolist(),
            }
            for group in rollout.groups
        ],
    }


def from_plain(plain: Mapping[str, Any], rows: Rows) -> Rollout:
    """The rollout that `to_plain` was given; what was logged about it has been logged."""
    groups = [
        Group(
            one["row"],
            rows[one["row"]],
            one["prompt_ids"],
            [Completion(**completion) for completion in one["completions"]],
            None if one["rewards"] is None else torch.tensor(one["rewards"]),
            None if one["advantages"] is None else torch.tensor(one["advantages"]),
        )
        for one in plain["groups"]
    ]
    return Rollout(plain["number"], plain["version"], groups)


def readable(rollout: Rollout, names: Sequence[str], decode: Callable[[list[int]], str]) -> Iterator[dict[str, Any]]:
    """One flat object for each completion: prompt, text, rewards, advantage."""
    for group in rollout.groups:
        rewards = [] if group.rewards_SR is None else group.rewards_SR.tolist()
        advantages = [] if group.advantage_S is None else group.advantage_S.tolist()
        for place, one in enumerate(group.completions):
            yield {
                "rollout": rollout.number,
                "version": rollout.version,
                "row": group.number,
                "prompt": group.row.get("prompt", decode(group.prompt_ids)),
                "completion": decode(one.ids) if one.text is None else one.text,
                "tokens": len(one.ids),
                "finished": one.finished,
                "rewards": {name: _number(value) for name, value in zip(names, rewards[place], strict=True)},
                "advantage": advantages[place] if advantages else None,
                **{name: values[place] for name, values in group.extras.items()},
            }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
