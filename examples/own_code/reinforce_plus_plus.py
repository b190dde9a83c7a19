"""REINFORCE++ with a baseline (arXiv:2501.03262): rewards less their group's mean, scaled over the whole rollout."""

import torch


def advantages(rewards, groups, floor: float = 1e-4):
    """Rewards (NaN: none applies) and group numbers of completions in, one advantage for each out."""
    known = ~rewards.isnan()
    values = rewards.nan_to_num(0.0)
    sizes = torch.bincount(groups, known.float()).clamp(min=1)
    centred = (values - (torch.bincount(groups, values) / sizes)[groups]) * known
    return centred / (centred[known].std() + floor)
