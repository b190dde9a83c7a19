"""Advantages of a rollout by a user's function."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.methods.formulas.advantages import weighted_reward
from upweight.methods.users.function import Call
from upweight.rollout.credit import credited, rewards_to_go
from upweight.types import Group


def add_user_advantages(
    call: Call, groups: Sequence[Group], group_S: Tensor, method: Method, log_ratio_S: Tensor | None
) -> None:
    """Set the advantages of all completions, or of their tokens, to what the function returns."""
    rewards_SR = torch.cat([group.rewards_SR for group in groups if group.rewards_SR is not None])
    weights = None if method.online_settings is None else method.online_settings.reward_weights
    reward_S = weighted_reward(rewards_SR, weights)
    values = _values(groups, rewards_SR, reward_S, group_S, log_ratio_S) | {
        "rewards_to_go": lambda: weighted_reward(rewards_to_go(groups, method.discount or 1.0), weights)
    }
    advantage_S, by_token = _checked(call, call(values, method), reward_S, values["lengths"]().tolist())
    start = 0
    for group in groups:
        stop = start + len(group.completions)
        group.advantage_S = advantage_S[start:stop]
        if by_token:
            group.completions = [credited(*one) for one in zip(group.completions, by_token[start:stop], strict=True)]
        start = stop


def _values(
    groups: Sequence[Group], rewards_SR: Tensor, reward_S: Tensor, group_S: Tensor, log_ratio_S: Tensor | None
) -> dict[str, Callable[[], Any]]:
    """Return what the function can ask for, one entry for each completion."""
    each = [(group, number, one) for group in groups for number, one in enumerate(group.completions)]
    names = dict.fromkeys(name for group in groups for name in group.row if name not in PREPARED_COLUMNS)
    extras = dict.fromkeys(name for group in groups for name in group.extras)
    return {
        "rewards": reward_S.clone,
        "rewards_by_function": rewards_SR.clone,
        "groups": group_S.clone,
        "lengths": lambda: torch.tensor([len(one.completion_ids) for *_, one in each]),
        "finished": lambda: torch.tensor([one.finished for *_, one in each]),
        "columns": lambda: {name: [group.row.get(name) for group, *_ in each] for name in names},
        "extras": lambda: {
            name: [group.extras[name][number] if name in group.extras else None for group, number, _ in each]
            for name in extras
        },
        # Known once the rollout's log-probs are computed, just before it is trained on.
        "log_ratio": lambda: torch.zeros_like(reward_S) if log_ratio_S is None else log_ratio_S.to(reward_S.dtype),
    }


def _checked(
    call: Call, result: Any, reward_S: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, list[list[float]] | None]:
    """Return an advantage for each completion, and for each of its tokens if the function returned such."""
    wanted = f"one number for each of {len(lengths)} completions, or for each of their tokens (a list of tensors)"
    try:
        several = isinstance(result, list | tuple) and any(isinstance(row, list | tuple | Tensor) for row in result)
        several = several and any(torch.as_tensor(row).ndim for row in result)
        rows = [torch.as_tensor(row).float() for row in result] if several else torch.as_tensor(result).float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{call.where} returned a {type(result).__name__} of other things; wanted {wanted}.") from error
    if isinstance(rows, Tensor) and rows.ndim == 1 and len(rows) == len(lengths):
        return _finite(call, rows, reward_S), None
    if len(rows) != len(lengths) or any(row.ndim != 1 for row in rows):
        shape = list(rows.shape) if isinstance(rows, Tensor) else f"a list of {len(rows)}"
        raise UserError(f"{call.where} returned {shape}; wanted {wanted}.")
    padded = isinstance(rows, Tensor)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if len(row) < length or (len(row) > length and not padded):
            raise UserError(f"{call.where}: completion {number} has {length} tokens, and {len(row)} advantages.")
    parts = zip(rows, lengths, reward_S, strict=True)
    kept = [_finite(call, row[:length], reward) for row, length, reward in parts]
    return torch.stack([row.mean() if len(row) else row.sum() for row in kept]), [row.tolist() for row in kept]


def _finite(call: Call, advantages: Tensor, rewards: Tensor) -> Tensor:
    """Return advantages with 0 where no reward applies; raise where they are NaN or infinite though one does."""
    unrewarded = rewards.isnan().expand_as(advantages)
    if bool((~advantages.isfinite() & ~unrewarded).any()):
        remedy = "Guard divisions, and leave rewards that are missing (NaN) out of means."
        raise UserError(f"{call.where} returned NaN or infinity for completions that have a reward. {remedy}")
    return torch.where(unrewarded, 0.0, advantages)
