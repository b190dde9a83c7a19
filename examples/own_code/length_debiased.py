"""GRPO without its bias by length (arXiv:2503.20783): every token weighs the same, however long its completion is."""

import torch


def loss(ratio, advantages, mask, epsilon, max_completion_length):
    """Ratios and advantages by token [S, L] in, one term for each completion out; its average is taken over them."""
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    term = -torch.minimum(ratio * advantages, clipped * advantages) * mask
    return term.sum(1) / max_completion_length  # a constant where GRPO has the completion's length


# Completions without an advantage add nothing, so they need no forward.
loss.skip_zero_advantage = True  # pyright: ignore[reportFunctionMemberAccess]
