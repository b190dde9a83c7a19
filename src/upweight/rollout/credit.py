"""Advantages of tokens, from the rewards that follow them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from upweight.methods.base import Method
from upweight.types import Completion, Group


def credit_tokens(groups: Sequence[Group], group_S: Tensor, method: Method, discount: float) -> None:
    """Give each token of the completions the advantage of the rewards from it on, where that is not their sum's."""
    if discount == 1 and not any(group.credits for group in groups):
        return
    advantage_ST = method.advantages(rewards_to_go(groups, discount), group_S)
    rows = iter(advantage_ST.tolist())
    for group in groups:
        group.completions = [credited(one, next(rows)) for one in group.completions]


def rewards_to_go(groups: Sequence[Group], discount: float) -> Tensor:
    """Return the discounted rewards from each token on, `rewards_SRT`; past its end a completion keeps its last."""
    lengths = [max(len(one.written), 1) for group in groups for one in group.completions]
    rewards = [group.rewards_SR for group in groups if group.rewards_SR is not None]
    rewards_SR = torch.cat(rewards).double()
    last_S = torch.tensor(lengths) - 1
    count, functions = rewards_SR.shape
    values_SRT = torch.zeros(count, functions, max(lengths, default=1), dtype=torch.float64)
    values_SRT.scatter_(2, last_S[:, None, None].expand(count, functions, 1), rewards_SR[..., None])
    start = 0
    for group in groups:
        for (number, reward), credit in group.credits.items():
            row_T = values_SRT[start + number, reward].zero_()
            ends, values = zip(*credit, strict=True) if credit else ((), ())
            row_T.index_add_(0, torch.tensor(ends, dtype=torch.int64) - 1, torch.tensor(values, dtype=torch.float64))
        start += len(group.completions)
    for position in range(values_SRT.shape[2] - 2, -1, -1):
        values_SRT[..., position] += discount * values_SRT[..., position + 1]
    held_ST = torch.minimum(torch.arange(values_SRT.shape[2]), last_S[:, None])
    return values_SRT.gather(2, held_ST[:, None].expand_as(values_SRT))


def credited(one: Completion, values: list[float]) -> Completion:
    """Return a completion with these advantages of its tokens; earlier segments have that of the first token."""
    written = len(one.written)
    earlier = [credited(segment, values[:1] * len(segment.written)) for segment in one.earlier]
    return replace(one, advantages=[0.0] * one.prompt_len + values[:written], earlier=earlier)
