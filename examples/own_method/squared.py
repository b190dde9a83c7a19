"""A policy loss of our own: the squared residual of Kimi k1.5 (arXiv:2501.12599), with its baseline."""


def _group_mean(values, groups):
    """The mean of each completion's group; NaN is no value."""
    known = ~values.isnan()
    zeros = values.new_zeros(int(groups.max()) + 1)
    total = zeros.index_add(0, groups, values.nan_to_num(0.0))
    return (total / zeros.index_add(0, groups, known.to(values)).clamp(min=1))[groups]


def baseline(rewards, groups):
    """Rewards minus the mean reward of their group: one advantage for each completion."""
    return rewards - _group_mean(rewards, groups)


def loss(log_ratio, sequence_advantages, mask, lengths, *, tau: float = 0.1):
    """The policy should be as much likelier than it was as the advantage says: a term for each sequence."""
    moved = (log_ratio * mask).sum(1)
    residual = sequence_advantages - tau * moved
    return residual**2 / (2 * tau * lengths), {"squared/moved": moved.detach()}
