"""What the next tokens of two vocabularies are compared as: those of both, and on either side one for all others."""

from typing import NamedTuple

import torch
from torch import Tensor

_NOTHING = -1e30  # logit of an outcome that is not there, finite so that differences of two are


class Outcomes(NamedTuple):
    """How the tokens of one vocabulary are outcomes: K that another one has too, and one for the rest."""

    shared_K: Tensor  # ids, in an order that both vocabularies have
    others_R: Tensor  # all other ids
    outcome_V: Tensor  # of each id; K: the rest
    bucket: bool  # whether the rest is an outcome; else both sides are renormalised without it

    @classmethod
    def of(cls, shared: Tensor, vocabulary: int, *, bucket: bool) -> "Outcomes":
        """Return the outcomes of a vocabulary of which these ids are shared."""
        outcome_V = torch.full((vocabulary,), len(shared), dtype=torch.int64, device=shared.device)
        outcome_V[shared] = torch.arange(len(shared), device=shared.device)
        return cls(shared, (outcome_V == len(shared)).nonzero()[:, 0], outcome_V, bucket)

    def logits(self, logits_TV: Tensor, temperature: float) -> Tensor:
        """Return logits of the K outcomes and of the rest, whose softmax at the temperature adds up that of tokens."""
        kept_TK = logits_TV.index_select(1, self.shared_K)
        if not len(self.others_R):
            return torch.cat([kept_TK, torch.full_like(kept_TK[:, :1], _NOTHING)], 1)
        rest_T = (logits_TV.index_select(1, self.others_R) / temperature).logsumexp(-1) * temperature
        return torch.cat([kept_TK, rest_T[:, None]], 1)

    def gradient(self, grad_TC: Tensor, logits_TV: Tensor, rest_T: Tensor, temperature: float) -> Tensor:
        """Return the gradient with respect to all logits from that of the compared outcomes."""
        if not self.bucket:
            grad_TC = torch.cat([grad_TC, torch.zeros_like(grad_TC[:, :1])], 1)
        share_TV = torch.exp((logits_TV - rest_T[:, None]) / temperature)  # of a token in the rest
        in_rest_V = self.outcome_V == len(self.shared_K)
        return grad_TC.index_select(1, self.outcome_V) * torch.where(in_rest_V, share_TV, 1.0)

    def target(self, target_T: Tensor) -> Tensor:
        """Return the compared outcome of each token; where the rest is none, another in place of it."""
        return self.outcome_V[target_T].clamp(max=len(self.shared_K) - (0 if self.bucket else 1))


class Matched(NamedTuple):
    """The outcomes of a student's and a teacher's vocabulary, and the temperature of the comparison."""

    student: Outcomes
    teacher: Outcomes
    temperature: float

    @classmethod
    def of(cls, student: Tensor, teacher: Tensor, vocabularies: tuple[int, int], temperature: float = 1.0) -> "Matched":
        """Return what models with these numbers of logits are compared over, from the ids of the same tokens."""
        bucket = len(student) < min(vocabularies)
        ours, theirs = (
            Outcomes.of(ids, size, bucket=bucket) for ids, size in zip((student, teacher), vocabularies, strict=True)
        )
        return cls(ours, theirs, temperature)


def compared_columns(outcomes: Outcomes, ours_TC: Tensor, theirs_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the outcomes that are compared: all, or without the rest where one side has none."""
    return (ours_TC, theirs_TC) if outcomes.bucket else (ours_TC[:, :-1], theirs_TC[:, :-1])


def outside(ours_TC: Tensor, theirs_TC: Tensor, temperature: float) -> dict[str, Tensor]:
    """Return the probability that either side gives to the rest."""
    masses = [(logits / temperature).detach().softmax(-1)[:, -1] for logits in (ours_TC, theirs_TC)]
    return {"other_mass_T": masses[0], "teacher_other_mass_T": masses[1]}
