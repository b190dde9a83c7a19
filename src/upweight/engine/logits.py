"""From projections to log-probs and statistics of tokens, and the gradients of these: all of it row by row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upweight.engine.divergences import (
    OF_TEACHER,
    LogitTransform,
    compared,
    compared_gradient,
    listed,
    listed_gradient,
    softmax_parts,
)
from upweight.engine.outcomes import Outcomes, compared_columns, outside
from upweight.models.modules import replaced_forwards
from upweight.types import Divergence

STATISTICS = ("entropy_T", "log_sum_exp_T", "mean_logit_T", "log_collision_T", "is_top_T")
_SCALE_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


WITHOUT_TEACHER = Divergence()


@dataclass(frozen=True)
class HeadRequest:
    """What a head computes at each scored token."""

    transform: LogitTransform
    temperature: float = 1.0
    statistics: frozenset[str] = frozenset()
    divergence: Divergence = WITHOUT_TEACHER  # from a teacher, where one is given
    teacher_transform: LogitTransform | None = None  # of its projections; None: it lists tokens
    chunk_tokens: int | None = None  # most tokens whose logits exist at a time; None: by the device

    @property
    def names(self) -> tuple[str, ...]:
        return "logps_T", *sorted(self.statistics)


def logit_transform(base: PreTrainedModel, body: nn.Module) -> LogitTransform | None:
    """Return how this model turns its projection into logits, observed in its forward; None when it does more."""
    # Fixed numbers replace the outputs of the body and the projection, so that no weight is read: this works for models
    # on the meta device and for sharded ones, and costs nothing.
    head, config = base.get_output_embeddings(), base.config.get_text_config()
    assert head is not None
    if not hasattr(config, "hidden_size"):  # several bodies, each with a size of its own
        return None
    hidden_1ND = torch.linspace(-2, 2, 2 * config.hidden_size).view(1, 2, -1)
    projected_1NV = torch.linspace(-40, 40, 2 * config.vocab_size).view(1, 2, -1)
    seen: list[Tensor] = []

    def project(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden.detach())
        return projected_1NV

    try:
        with replaced_forwards({body: HiddenStatesOutput(hidden_1ND), head: project}):
            out = base.forward(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except RuntimeError:  # weights between body and head met our numbers on another device
        return None
    if len(seen) != 1 or seen[0].shape != hidden_1ND.shape:
        return None
    # a model that scales the hidden state before the head scales the logits by as much
    ratio = float((seen[0].float() * hidden_1ND).sum() / (hidden_1ND * hidden_1ND).sum())
    if not torch.allclose(seen[0].float(), hidden_1ND * ratio, rtol=1e-2, atol=1e-2):
        return None
    if abs(ratio - 1) < 1e-2:
        ratio = 1.0
    elif getattr(head, "bias", None) is not None:
        return None
    logits = out.logits.float()
    for transform in _possible_transforms(config):
        if torch.allclose(logits, transform(projected_1NV), rtol=1e-3, atol=1e-3):
            return LogitTransform(transform.scale * ratio, transform.cap)
    return None


class HiddenStatesOutput:
    """Replaces any body output: it has hidden states, and None for every other field. As a forward it gives itself."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __call__(self, *args: Any, **kwargs: Any) -> "HiddenStatesOutput":
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def _possible_transforms(config: Any) -> list[LogitTransform]:
    """Return the transforms that the fields of a config allow."""
    scales = [1.0]
    for name in _SCALE_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales += [float(value), 1 / value]
    cap = getattr(config, "final_logit_softcapping", None)
    caps = [None] if cap is None else [None, float(cap)]
    return [LogitTransform(scale, cap) for scale in scales for cap in caps]


def token_statistics(
    projected_TV: Tensor,
    target_T: Tensor,
    request: HeadRequest,
    teacher: Tensor | None = None,
    outcomes: Outcomes | None = None,
) -> dict[str, Tensor]:
    """Return the log-prob of each target and the requested statistics, in float32 at the temperature.

    `teacher`: its projections of the same tokens, or the ids that it lists; `outcomes`: where its vocabulary is
    another, what the tokens of this one are compared as, and `teacher` is its logits of these.
    """
    raw = request.transform(projected_TV.float())
    policy = softmax_parts(raw, request.temperature)
    out: dict[str, Tensor] = {}
    if teacher is not None and request.teacher_transform is None:
        out = listed(raw, teacher, request.divergence)
    elif teacher is not None and request.teacher_transform is not None:
        how, theirs, target = request.divergence, request.teacher_transform(teacher.float()), target_T
        if outcomes is not None:
            ours = outcomes.logits(raw, how.temperature)
            masses = outside(ours, theirs, how.temperature)
            kept, theirs = compared_columns(outcomes, ours, theirs)
            student, target = softmax_parts(kept, how.temperature), outcomes.target(target_T)
        else:
            masses = {}
            student = policy if how.temperature == request.temperature else softmax_parts(raw, how.temperature)
        out = compared(student, theirs, target, how) | masses
    logits, shifted_TV, total_T, log_sum_exp_T = policy
    out["logps_T"] = logits.gather(-1, target_T[:, None]).squeeze(-1) - log_sum_exp_T
    out["log_sum_exp_T"] = log_sum_exp_T
    if "entropy_T" in request.statistics:
        out["entropy_T"] = log_sum_exp_T - (shifted_TV * logits).sum(-1) / total_T
    if "mean_logit_T" in request.statistics:
        out["mean_logit_T"] = logits.mean(-1)
    if "log_collision_T" in request.statistics:
        out["log_collision_T"] = (shifted_TV * shifted_TV).sum(-1).log() - 2 * total_T.log()
    if "is_top_T" in request.statistics:
        out["is_top_T"] = logits.argmax(-1) == target_T
    return out


def token_gradient(
    projected_TV: Tensor,
    target_T: Tensor,
    request: HeadRequest,
    known: dict[str, Tensor],
    grads: dict[str, Tensor],
    *,
    teacher: Tensor | None = None,
    outcomes: Outcomes | None = None,
) -> Tensor:
    """Return the gradient of the projections, from the forward's statistics and the gradients of each of them."""
    capped = request.transform(projected_TV.float())
    grad_TV = None
    if teacher is not None and request.teacher_transform is None:
        grad_TV = listed_gradient(capped, teacher, request.divergence, known, grads)
    elif teacher is not None and request.teacher_transform is not None and "divergence_T" in grads:
        how, theirs = request.divergence, request.teacher_transform(teacher.float())
        if outcomes is None:
            grad_TV = compared_gradient(capped, theirs, how, known, grads["divergence_T"])
        else:
            ours = outcomes.logits(capped, how.temperature)
            kept, theirs = compared_columns(outcomes, ours, theirs)
            grad_TC = compared_gradient(kept, theirs, how, known, grads["divergence_T"])
            grad_TV = outcomes.gradient(grad_TC, capped, ours[:, -1], how.temperature)
    if grad_TV is None or not OF_TEACHER.issuperset(grads):
        rest_TV = _gradient_without_teacher(capped, target_T, request, known, grads)
        grad_TV = rest_TV if grad_TV is None else grad_TV + rest_TV
    if request.transform.cap is not None:
        grad_TV *= 1 - (capped / request.transform.cap) ** 2
    factor = request.transform.scale
    return (grad_TV if factor == 1.0 else grad_TV.mul_(factor)).to(projected_TV.dtype)


def _gradient_without_teacher(
    capped: Tensor, target_T: Tensor, request: HeadRequest, known: dict[str, Tensor], grads: dict[str, Tensor]
) -> Tensor:
    """Return the gradient of the logits from the statistics that need no teacher."""
    logits = capped if request.temperature == 1.0 else capped / request.temperature
    log_p = logits - known["log_sum_exp_T"][:, None]
    p = log_p.exp()
    to_logp = grads.get("logps_T", torch.zeros_like(known["log_sum_exp_T"]))
    weight_T = -to_logp
    if "log_sum_exp_T" in grads:
        weight_T = weight_T + grads["log_sum_exp_T"]
    if "log_collision_T" in grads:
        weight_T = weight_T - 2 * grads["log_collision_T"]
    extra = None
    if "entropy_T" in grads:
        extra = p * (log_p + known["entropy_T"][:, None]) * -grads["entropy_T"][:, None]
    if "log_collision_T" in grads:
        squares = torch.exp(2 * log_p - known["log_collision_T"][:, None]) * (2 * grads["log_collision_T"][:, None])
        extra = squares if extra is None else extra + squares
    if "mean_logit_T" in grads:
        even = grads["mean_logit_T"][:, None] / log_p.shape[-1]
        extra = even if extra is None else extra + even
    grad_TV = p.mul_(weight_T[:, None])
    if extra is not None:
        grad_TV += extra
    if torch.compiler.is_compiling():  # a scatter would not be fused
        column_V = torch.arange(grad_TV.shape[1], device=grad_TV.device)
        grad_TV = torch.where(column_V == target_T[:, None], grad_TV + to_logp[:, None], grad_TV)
    else:
        grad_TV.scatter_add_(1, target_T[:, None], to_logp[:, None])
    return grad_TV if request.temperature == 1.0 else grad_TV.mul_(1 / request.temperature)
