"""Advantages of the sequences of a generation batch from its rewards; a NaN reward does not apply.

Where rewards are those from each token on, every tensor has a further axis of token positions (`_ST`, `_SRT`): each
position has its own mean, and all of them are divided by the largest of their deviations.
"""

from typing import Literal

from upweight.errors import UserError
from upweight.lazy_imports import Tensor, torch

EPSILON = 1e-4
Scale = Literal["group", "batch", "none"]


def group_statistics(values_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, sample standard deviation and size of each value's group, without NaN, for every sequence."""
    valid_S = ~values_S.isnan()
    # In float64 the mean of equal float32 rewards is exact, so that a group without spread gets exactly zero.
    values_S = values_S.double().nan_to_num(0.0)
    groups = int(group_S.max()) + 1 if len(group_S) else 0

    def total(terms_S: Tensor) -> Tensor:
        return terms_S.new_zeros(groups, *terms_S.shape[1:]).index_add(0, group_S, terms_S)[group_S]

    size_S = total(valid_S.double())
    mean_S = total(values_S) / size_S.clamp(min=1)
    squares_S = total((values_S - mean_S) ** 2 * valid_S)
    return mean_S, (squares_S / (size_S - 1).clamp(min=1)).sqrt(), size_S


def weighted_reward(rewards_SR: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    """Weighted sum of the rewards that apply; NaN where none does."""
    count = rewards_SR.shape[1]
    if weights is not None and len(weights) != count:
        raise UserError(f"trl.reward_weights has {len(weights)} entries for {count} reward functions: give one each")
    weight_R = torch.tensor(weights or (1.0,) * count, dtype=torch.float64, device=rewards_SR.device)
    total_S = (rewards_SR.double() * weight_R.view(-1, *[1] * (rewards_SR.ndim - 2))).nansum(1).float()
    return total_S.masked_fill(rewards_SR.isnan().all(1), float("nan"))


def normalised(reward_S: Tensor, group_S: Tensor, scale: Scale) -> Tensor:
    """Rewards minus their group's mean, divided by the deviation of the group or of the batch."""
    mean_S, std_S, _ = group_statistics(reward_S, group_S)
    if scale == "batch":
        std_S = group_statistics(reward_S, torch.zeros_like(group_S))[1]
    if std_S.ndim > 1:
        std_S = std_S.amax(1, keepdim=True)
    divisor_S = torch.ones_like(std_S) if scale == "none" else std_S + EPSILON
    return ((reward_S - mean_S) / divisor_S).nan_to_num(0.0).float()


def leave_one_out(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """RLOO: rewards minus the mean of the group's other rewards; the reward of a group of one is unchanged."""
    mean_S, _, size_S = group_statistics(reward_S, group_S)
    apart_S = (reward_S - mean_S) * size_S / (size_S - 1).clamp(min=1)
    return torch.where(size_S > 1, apart_S, reward_S.double()).nan_to_num(0.0).float()


def decoupled(rewards_SR: Tensor, group_S: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    """GDPO: each reward normalised in its group, then summed, then normalised over the batch."""
    columns = []
    for reward_S in rewards_SR.unbind(1):
        score_S = normalised(reward_S, group_S, "group")
        columns.append(score_S.masked_fill(reward_S.isnan(), float("nan")))
    total_S = weighted_reward(torch.stack(columns, 1), weights)
    return normalised(total_S, torch.zeros_like(group_S), "batch")
