"""A policy loss of our own: the squared residual of Kimi k1.5 (arXiv:2501.12599), with its baseline."""

import torch


def baseline(rewards, groups):
    """Rewards minus the mean reward of their group: one advantage for each completion."""
    known = rewards.nan_to_num(0.0)
    total = torch.zeros(int(groups.max()) + 1).index_add(0, groups, known)
    count = torch.zeros(int(groups.max()) + 1).index_add(0, groups, (~rewards.isnan()).float())
    return rewards - (total / count.clamp(min=1))[groups]


def loss(log_ratio, sequence_advantages, mask, lengths, *, tau: float = 0.1):
    """The policy should be as much likelier than it was as the advantage says: a term for each sequence."""
    moved = (log_ratio * mask).sum(1)
    residual = sequence_advantages - tau * moved
    return residual**2 / (2 * tau * lengths), {"squared/moved": moved.detach()}
