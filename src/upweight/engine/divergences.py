"""Divergences of a student from a teacher at the scored tokens, chunk by chunk: whole logits of neither ever exist."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from upweight.engine.outcomes import Matched
from upweight.types import Divergence

COMPARED = ("divergence_T", "forward_kl_T", "reverse_kl_T", "teacher_entropy_T", "teacher_logps_T", "agrees_T")
OUTSIDE = ("other_mass_T", "teacher_other_mass_T")  # where vocabularies differ
LISTED = ("listed_logps_TK", "listed_tail_T", "agrees_T")
ONLY_MEASURED = frozenset({*COMPARED[1:], *OUTSIDE})  # statistics without a gradient
OF_TEACHER = frozenset({"divergence_T", "listed_logps_TK", "listed_tail_T"})  # statistics with one
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LogitTransform:
    """Logits are `cap * tanh(scale * projection / cap)`; without a cap, `scale * projection`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, projection: Tensor) -> Tensor:
        scaled = projection if self.scale == 1.0 else projection * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class TeacherStates:
    """A teacher's hidden states at the scored tokens, with the projection and the transform that make them logits."""

    hidden_TE: Tensor
    project: Callable[[Tensor], Tensor]
    transform: LogitTransform
    vocabulary: int  # rows of its projection
    matched: Matched | None = None  # None: both vocabularies are the same

    @property
    def chunk_width(self) -> int:
        """How many numbers a chunk holds for each scored token."""
        return self.vocabulary + (0 if self.matched is None else 2 * len(self.matched.teacher.shared_K))

    @property
    def logit_transform(self) -> LogitTransform:
        """What is still to be done to `values`."""
        return self.transform if self.matched is None else LogitTransform()

    def rows(self, index: Tensor | slice) -> "TeacherStates":
        """Return the states of some of the scored tokens."""
        return replace(self, hidden_TE=self.hidden_TE[index])

    @torch.no_grad()
    def values(self, columns: int) -> Tensor:
        """Return the projections to the first `columns` tokens of a vocabulary of both, or the logits of outcomes."""
        projected = self.project(self.hidden_TE)
        if self.matched is None:
            return projected[:, :columns]
        logits_TV = self.transform(projected[:, : self.vocabulary].float())
        return self.matched.teacher.logits(logits_TV, self.matched.temperature)


@dataclass(frozen=True, eq=False)
class TeacherList:
    """Token ids that a teacher lists at each scored token, the most likely first; -1 fills rows that list fewer."""

    ids_TK: Tensor

    def rows(self, index: Tensor | slice) -> "TeacherList":
        """Return the lists of some of the scored tokens."""
        return TeacherList(self.ids_TK[index])

    def values(self, columns: int) -> Tensor:
        """Return the ids."""
        return self.ids_TK


Teacher = TeacherStates | TeacherList


class TopK(NamedTuple):
    """The most likely tokens of a teacher, their log-probs, and the log of the mass that all others have."""

    ids_TK: Tensor
    logps_TK: Tensor
    tail_T: Tensor


@torch.no_grad()
def top_k(states: TeacherStates, k: int, temperature: float, rows: int) -> TopK:
    """Return a teacher's top `k` tokens, of its whole vocabulary, for `rows` scored tokens at a time."""
    parts: list[TopK] = []
    for start in range(0, max(len(states.hidden_TE), 1), rows):  # a row may have no scored token at all
        logits = states.transform(states.rows(slice(start, start + rows)).values(states.vocabulary).float())
        logits = logits / temperature
        values_TK, ids_TK = logits.topk(min(k, logits.shape[1]), -1)
        log_sum_T = logits.logsumexp(-1)
        tail_T = logits.scatter(1, ids_TK, -torch.inf).logsumexp(-1) - log_sum_T
        parts.append(TopK(ids_TK, values_TK - log_sum_T[:, None], tail_T))
    return TopK(*(torch.cat(column) for column in zip(*parts, strict=True)))


class SoftmaxParts(NamedTuple):
    """Logits at a temperature, their exponentials below 1, the sums of those, and the logs of the sums of all."""

    logits_TV: Tensor
    shifted_TV: Tensor
    total_T: Tensor
    log_sum_exp_T: Tensor


def softmax_parts(logits_TV: Tensor, temperature: float) -> SoftmaxParts:
    """Return what a softmax is made of; one exponential serves all, which on a CPU costs more than everything else."""
    logits_TV = logits_TV if temperature == 1.0 else logits_TV / temperature
    top_T = logits_TV.amax(-1).detach()
    shifted_TV = torch.exp(logits_TV - top_T[:, None])
    total_T = shifted_TV.sum(-1)
    return SoftmaxParts(logits_TV, shifted_TV, total_T, total_T.log() + top_T)


def compared(student: SoftmaxParts, teacher_TV: Tensor, target_T: Tensor, how: Divergence) -> dict[str, Tensor]:
    """Return the divergence of the student from a teacher's logits, and what is measured beside it."""
    z_TV, to_q, q_total_T, q_norm_T = student
    v_TV, to_p, p_total_T, p_norm_T = softmax_parts(teacher_TV, how.temperature)
    # log p - log q, whose rounding does not grow with the size of the logits
    shift_T = (p_norm_T - q_norm_T).detach()
    ratio = v_TV - z_TV
    ratio -= (p_norm_T - q_norm_T)[:, None]
    forward_T, reverse_T = _dot(to_p, ratio) / p_total_T, -_dot(to_q, ratio) / q_total_T
    out = {"forward_kl_T": forward_T.detach(), "reverse_kl_T": reverse_T.detach()}
    if how.kind == "jsd":
        to_mixture = _mixture_ratio(ratio, how.beta)  # log m - log q
        inner_T, mixed_T = -_dot(to_q, to_mixture) / q_total_T, _dot(to_p, to_mixture) / p_total_T
        out["divergence_T"] = how.beta * (forward_T - mixed_T) + (1 - how.beta) * inner_T
        out["divergence_inner_T"] = inner_T.detach()
    else:
        out["divergence_T"] = forward_T if how.kind == "forward_kl" else reverse_T
        out["divergence_inner_T"] = reverse_T.detach()
    out["divergence_shift_T"], out["divergence_norm_T"] = shift_T, q_norm_T.detach()
    out["teacher_logps_T"] = v_TV.gather(1, target_T[:, None])[:, 0] - p_norm_T
    out["teacher_entropy_T"] = p_norm_T - _dot(to_p, v_TV) / p_total_T
    out["agrees_T"] = z_TV.detach().argmax(-1) == v_TV.argmax(-1)
    return out


def compared_gradient(
    logits_TV: Tensor, teacher_TV: Tensor, how: Divergence, known: dict[str, Tensor], grad_T: Tensor
) -> Tensor:
    """Return the gradient of the divergence with respect to the student's logits, times that of each token."""
    if how.temperature != 1.0:
        logits_TV, teacher_TV = logits_TV / how.temperature, teacher_TV / how.temperature
    weight_T = grad_T / how.temperature
    shift_T, inner_T = known["divergence_shift_T"], known["divergence_inner_T"]
    q = torch.exp(logits_TV - known["divergence_norm_T"][:, None])
    if how.kind == "forward_kl":
        p = torch.exp(teacher_TV - (known["divergence_norm_T"] + shift_T)[:, None])
        return (q - p) * weight_T[:, None]
    ratio = teacher_TV - logits_TV
    if how.kind == "jsd":
        ratio, shift_T, weight_T = _mixture_ratio(ratio - shift_T[:, None], how.beta), 0.0, (1 - how.beta) * weight_T
    ratio += (inner_T - shift_T)[:, None]
    return ratio * q * -weight_T[:, None]


def _dot(a_TV: Tensor, b_TV: Tensor) -> Tensor:
    """Return the sum of products over the last dimension; outside of a compiled graph without a third tensor."""
    if torch.compiler.is_compiling() or a_TV.is_cuda:
        return (a_TV * b_TV).sum(-1)
    return torch.bmm(a_TV[:, None], b_TV[:, :, None])[:, 0, 0]


def _mixture_ratio(ratio: Tensor, beta: float) -> Tensor:
    """Return log m - log q of the mixture m = beta p + (1 - beta) q, from log p - log q."""
    return torch.logaddexp(ratio + log(beta), torch.full_like(ratio, log(1 - beta)))


def listed(logits_TV: Tensor, ids_TK: Tensor, how: Divergence) -> dict[str, Tensor]:
    """Return the log-probs of the listed tokens (0 in unused places), the log of the mass of others, and agreement."""
    log_q = (logits_TV / how.temperature).log_softmax(-1)
    logps_TK = torch.where(ids_TK >= 0, log_q.gather(1, ids_TK.clamp(min=0)), 0.0)
    tail_T = (log_q.exp() * _others(log_q, ids_TK)).sum(-1).clamp(min=_TINY).log()
    agrees_T = log_q.detach().argmax(-1) == ids_TK[:, 0]
    return {"listed_logps_TK": logps_TK, "listed_tail_T": tail_T, "agrees_T": agrees_T}


def listed_gradient(
    logits_TV: Tensor, ids_TK: Tensor, how: Divergence, known: dict[str, Tensor], grads: dict[str, Tensor]
) -> Tensor:
    """Return the gradient of the listed log-probs and of the others' mass with respect to the student's logits."""
    q = (logits_TV / how.temperature).softmax(-1)
    weight_T, grad_TV = torch.zeros_like(q[:, 0]), torch.zeros_like(q)
    if "listed_tail_T" in grads:
        grad_T = grads["listed_tail_T"]
        grad_TV = q * _others(q, ids_TK) * (grad_T * (-known["listed_tail_T"]).exp())[:, None]
        weight_T = weight_T - grad_T
    if "listed_logps_TK" in grads:
        grad_TK = torch.where(ids_TK >= 0, grads["listed_logps_TK"], 0.0)
        grad_TV = grad_TV.scatter_add(1, ids_TK.clamp(min=0), grad_TK)
        weight_T = weight_T - grad_TK.sum(-1)
    return (grad_TV + q * weight_T[:, None]) / how.temperature


def _others(like_TV: Tensor, ids_TK: Tensor) -> Tensor:
    """Return 0 at the listed tokens and 1 at all others."""
    ones = torch.ones_like(like_TV, requires_grad=False)
    return ones.scatter_reduce(1, ids_TK.clamp(min=0), (ids_TK < 0).to(ones), "prod")
