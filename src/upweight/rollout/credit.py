"""Advantages of tokens, from the rewards that follow them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from upweight.methods.base import Method
from upweight.types import Completion, Group


def credit_tokens(groups: Sequence[Group], group_S: Tensor, method: Method, discount: float) -> None:
    """Set each token's advantage from the rewards from it on, unless all are undiscounted and at the last token."""
    if discount == 1 and not any(group.credits for group in groups):
        return
    advantage_ST = method.advantages(rewards_to_go(groups, discount), group_S)
    rows = iter(advantage_ST.tolist())
    for group in groups:
        group.completions = [credited(one, next(rows)) for one in group.completions]


def rewards_to_go(groups: Sequence[Group], discount: float) -> Tensor:
    """Return the discounted rewards from each token on, `rewards_SRT`; past its end a completion keeps its last."""
    lengths = [max(len(one.completion_ids), 1) for group in groups for one in group.completions]
    rewards = [group.rewards_SR for group in groups if group.rewards_SR is not None]
    rewards_SR = torch.cat(rewards).double()
    last_S = torch.tensor(lengths) - 1
    values_TSR = torch.zeros(max(lengths, default=1), *rewards_SR.shape, dtype=torch.float64)
    values_TSR[last_S, torch.arange(len(last_S))] = rewards_SR
    start = 0
    for group in groups:
        for (number, reward), credit in group.credits.items():
            row_T = values_TSR[:, start + number, reward].zero_()
            pair_X2 = torch.tensor(credit, dtype=torch.float64).view(-1, 2)
            row_T.index_add_(0, pair_X2[:, 0].long() - 1, pair_X2[:, 1])
        start += len(group.completions)
    for position in range(len(values_TSR) - 2, -1, -1):
        values_TSR[position].add_(values_TSR[position + 1], alpha=discount)
    held_TS = torch.minimum(torch.arange(len(values_TSR))[:, None], last_S)
    return values_TSR.gather(0, held_TS[..., None].expand_as(values_TSR)).permute(1, 2, 0)


def credited(one: Completion, values: list[float]) -> Completion:
    """Return a completion with these advantages of its tokens; earlier segments have that of the first token."""
    written = len(one.completion_ids)
    earlier = [credited(segment, values[:1] * len(segment.completion_ids)) for segment in one.earlier]
    return replace(one, advantages=[0.0] * one.prompt_len + values[:written], earlier=earlier)
