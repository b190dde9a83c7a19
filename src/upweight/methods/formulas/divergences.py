"""Divergences over the tokens that a teacher lists, with or without a bucket for the mass of all others."""

from math import log
from typing import Literal

from upweight.lazy_imports import Tensor, torch

Tail = Literal["bucket", "renormalise", "drop"]
_NOTHING = -1e30  # log of a probability that is zero, finite so that its gradient is


def listed_logs(
    policy_TK: Tensor, tail_T: Tensor, teacher_TK: Tensor, teacher_tail_T: Tensor | None, tail: Tail
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of policy and teacher over the same outcomes, and which of these the teacher knows."""
    known_TK = teacher_TK > -torch.inf
    log_q, log_p = policy_TK.masked_fill(~known_TK, _NOTHING), teacher_TK.masked_fill(~known_TK, _NOTHING)
    if tail == "renormalise":
        return log_q - log_q.logsumexp(-1, keepdim=True), log_p - log_p.logsumexp(-1, keepdim=True), known_TK
    if tail == "drop":
        return log_q, log_p, known_TK
    left_T = tail_mass(teacher_TK) if teacher_tail_T is None else teacher_tail_T.clamp(min=_NOTHING)
    log_q, log_p = torch.cat([log_q, tail_T[:, None]], -1), torch.cat([log_p, left_T[:, None]], -1)
    return log_q, log_p, torch.cat([known_TK, (left_T > _NOTHING)[:, None]], -1)


def tail_mass(teacher_TK: Tensor) -> Tensor:
    """Return the log of what the listed tokens leave of the whole mass."""
    # 1 - sum would lose the digits of a small rest.
    listed_T = teacher_TK.masked_fill(teacher_TK == -torch.inf, _NOTHING).double().logsumexp(-1)
    return (-torch.expm1(listed_T)).clamp(min=1e-12).log().to(teacher_TK.dtype)


def divergence(log_q: Tensor, log_p: Tensor, known: Tensor, kind: str, beta: float) -> Tensor:
    """Return forward_kl, reverse_kl or jsd of log-probs over outcomes in the last dimension."""
    p, q, ratio = log_p.exp() * known, log_q.exp() * known, torch.where(known, log_p - log_q, 0.0)
    if kind == "forward_kl":
        return (p * ratio).sum(-1)
    if kind == "reverse_kl":
        return -(q * ratio).sum(-1)
    mixed = torch.logaddexp(ratio + log(beta), torch.full_like(ratio, log(1 - beta)))  # log m - log q
    return beta * (p * (ratio - mixed)).sum(-1) - (1 - beta) * (q * mixed).sum(-1)
