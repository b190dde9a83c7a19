"""Rewards of groups: the arguments that reward functions get, and what they return."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from upweight.data.images.records import open_images
from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.rewards.reward import RewardCall
from upweight.rewards.scorer import RewardResult
from upweight.rollout.rollout import content_of, images_of
from upweight.rollout.summary import join_metrics
from upweight.types import Completion, Group


def reward_call(groups: Sequence[Group], decode: Callable[[list[int]], str], trainer_state: Any = None) -> RewardCall:
    """Return the arguments of reward functions for these groups, without failed completions."""
    each = [
        (index, group, number, one)
        for index, group in enumerate(groups)
        for number, one in enumerate(group.completions)
        if one.failure is None
    ]
    names = dict.fromkeys(name for group in groups for name in group.row if name not in PREPARED_COLUMNS)
    columns = {name: [group.row.get(name) for _, group, _, _ in each] for name in names}
    shown = [images_of(group, one) for _, group, _, one in each]
    if any(shown) or "images" in columns:  # an empty list for each, where the prompts of a call have none
        distinct = {ref.digest: ref for refs in shown for ref in refs}
        opened = dict(zip(distinct, open_images(list(distinct.values())), strict=True))
        columns["images"] = [[opened[ref.digest] for ref in refs] for refs in shown]
    for name in dict.fromkeys(name for group in groups for name in group.extras):
        values = [(group.extras.get(name), number) for _, group, number, _ in each]
        columns[name] = [column[number] if column else None for column, number in values]
    return RewardCall(
        prompts=[group.row.get("prompt") for _, group, _, _ in each],
        completions=[_scored_content(group, one, decode) for _, group, _, one in each],
        completion_ids=[one.completion_ids for *_, one in each],
        columns=columns,
        group_S=[index for index, *_ in each],
        decode=decode,
        environments=[group.environments[number] if group.environments else None for _, group, number, _ in each],
        trainer_state=trainer_state,
    )


def assign_rewards(scored: Sequence[tuple[list[Group], RewardResult]], *, by_part: bool = False) -> dict[str, float]:
    """Set the rewards of groups, with `by_part` also where they were earned; return the metrics of all calls."""
    for groups, scores in scored:
        start = 0
        for group in groups:
            kept = [number for number, one in enumerate(group.completions) if one.failure is None]
            stop = start + len(kept)
            group.rewards_SR = torch.full((len(group.completions), scores.rewards_SR.shape[1]), torch.nan)
            group.rewards_SR[kept] = scores.rewards_SR[start:stop]
            numbers = dict(enumerate(kept, start))
            placed = [(at, reward, credit) for (at, reward), credit in scores.credits.items() if at in numbers]
            group.credits = {(numbers[at], reward): credit for at, reward, credit in placed} if by_part else {}
            for name, values in scores.extras.items():
                group.extras[name] = [None] * len(group.completions)
                for number, value in zip(kept, values[start:stop], strict=True):
                    group.extras[name][number] = value
            start = stop
    return join_metrics(scores.metrics for _, scores in scored)


def _scored_content(group: Group, completion: Completion, decode: Callable[[list[int]], str]) -> Any:
    """Return what rewards read: messages where the prompt has messages, unless a rollout function returned text."""
    content = content_of(completion, decode)
    as_message = completion.messages is None and completion.text is None
    if as_message and not isinstance(group.row.get("prompt"), str):
        return [{"role": "assistant", "content": content}]
    return content
