"""Attention by a dense mask, slow and plain: what the tree attentions are compared with."""

import torch


def dense_mask(end_N, position_N, rule):
    """Who sees whom, token by token."""
    at = torch.arange(len(end_N))
    seen = (at[None] <= at[:, None]) & (at[:, None] < end_N[None])
    if rule.window is not None:
        seen &= position_N[:, None] - position_N[None] < rule.window
    if rule.chunk is not None:
        seen &= position_N[:, None] // rule.chunk == position_N[None] // rule.chunk
    return seen


def dense_attention(q, k, v, seen, *, scaling=1.0, softcap=None, sinks=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v
