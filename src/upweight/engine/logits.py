"""From the vocabulary projection to a model's logits, and from logits to statistics with their gradients."""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

STATISTICS = ("entropy_T", "log_sum_exp_T", "mean_logit_T", "log_collision_T", "is_top_T")

_SCALE_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


@dataclass(frozen=True)
class LogitForm:
    """Logits are `cap * tanh(scale * projection / cap)`; without a cap, `scale * projection`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, projection: Tensor) -> Tensor:
        scaled = projection if self.scale == 1.0 else projection * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


@dataclass(frozen=True)
class HeadRequest:
    """What a head shall compute at each scored token."""

    form: LogitForm
    temperature: float = 1.0
    statistics: frozenset[str] = frozenset()


def logit_form(base: PreTrainedModel, body: nn.Module) -> LogitForm | None:
    """How this model turns its projection into logits, found by watching its own forward; None when it does more.

    The body and the projection are stood in for by fixed numbers, so that no weight is read: this holds for models
    on the meta device and for sharded ones, and costs nothing.
    """
    head = base.get_output_embeddings()
    assert head is not None
    config = base.config.get_text_config()
    if not hasattr(config, "hidden_size"):  # several bodies, each with a size of its own
        return None
    hidden_1ND = torch.linspace(-2, 2, 2 * config.hidden_size).view(1, 2, -1)
    projected_1NV = torch.linspace(-40, 40, 2 * config.vocab_size).view(1, 2, -1)
    seen: list[Tensor] = []

    def project(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(hidden.detach())
        return projected_1NV

    before = body.__dict__.get("forward"), head.__dict__.get("forward")
    body.forward = MethodType(lambda self, *a, **k: BodyOutput(hidden_1ND), body)
    head.forward = MethodType(project, head)
    try:
        out = base.forward(input_ids=torch.zeros(1, 2, dtype=torch.long))
    except RuntimeError:  # weights between body and head met our numbers on another device
        return None
    finally:
        for module, forward in zip((body, head), before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
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
    for form in _candidates(config):
        if torch.allclose(logits, form(projected_1NV), rtol=1e-3, atol=1e-3):
            return LogitForm(form.scale * ratio, form.cap)
    return None


class BodyOutput:
    """Stands in for any body output: hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def _candidates(config: Any) -> list[LogitForm]:
    """The forms that the fields of a config allow."""
    scales = [1.0]
    for name in _SCALE_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value not in (0, 1):
            scales += [float(value), 1 / value]
    cap = getattr(config, "final_logit_softcapping", None)
    caps = [None] if cap is None else [None, float(cap)]
    return [LogitForm(scale, cap) for scale in scales for cap in caps]


def row_statistics(projected_TV: Tensor, target_T: Tensor, ask: HeadRequest) -> dict[str, Tensor]:
    """Projections -> log-prob of each target and the statistics asked for, in float32 at the temperature."""
    logits = ask.form(projected_TV.float())
    if ask.temperature != 1.0:
        logits = logits / ask.temperature
    # one exponential serves all: on a CPU it costs more than everything else here
    top_T = logits.amax(-1).detach()
    shifted_TV = torch.exp(logits - top_T[:, None])
    total_T = shifted_TV.sum(-1)
    log_sum_exp_T = total_T.log() + top_T
    out = {"logps_T": logits.gather(-1, target_T[:, None]).squeeze(-1) - log_sum_exp_T, "log_sum_exp_T": log_sum_exp_T}
    if "entropy_T" in ask.statistics:
        out["entropy_T"] = log_sum_exp_T - (shifted_TV * logits).sum(-1) / total_T
    if "mean_logit_T" in ask.statistics:
        out["mean_logit_T"] = logits.mean(-1)
    if "log_collision_T" in ask.statistics:
        out["log_collision_T"] = (shifted_TV * shifted_TV).sum(-1).log() - 2 * total_T.log()
    if "is_top_T" in ask.statistics:
        out["is_top_T"] = logits.argmax(-1) == target_T
    return out


def row_gradient(
    projected_TV: Tensor, target_T: Tensor, ask: HeadRequest, found: dict[str, Tensor], grads: dict[str, Tensor]
) -> Tensor:
    """The gradient of the projections, from the statistics `found` in the forward and the gradients that reach them."""
    capped = ask.form(projected_TV.float())
    log_p = (capped if ask.temperature == 1.0 else capped / ask.temperature) - found["log_sum_exp_T"][:, None]
    p = log_p.exp()
    to_logp = grads["logps_T"]
    weight_T = -to_logp
    if "log_sum_exp_T" in grads:
        weight_T = weight_T + grads["log_sum_exp_T"]
    if "log_collision_T" in grads:
        weight_T = weight_T - 2 * grads["log_collision_T"]
    extra = None
    if "entropy_T" in grads:
        extra = p * (log_p + found["entropy_T"][:, None]) * -grads["entropy_T"][:, None]
    if "log_collision_T" in grads:
        squares = torch.exp(2 * log_p - found["log_collision_T"][:, None]) * (2 * grads["log_collision_T"][:, None])
        extra = squares if extra is None else extra + squares
    if "mean_logit_T" in grads:
        even = grads["mean_logit_T"][:, None] / log_p.shape[-1]
        extra = even if extra is None else extra + even
    slope = p.mul_(weight_T[:, None])
    if extra is not None:
        slope += extra
    if torch.compiler.is_compiling():  # a scatter would not be fused
        column_V = torch.arange(slope.shape[1], device=slope.device)
        slope = torch.where(column_V == target_T[:, None], slope + to_logp[:, None], slope)
    else:
        slope.scatter_add_(1, target_T[:, None], to_logp[:, None])
    if ask.form.cap is not None:
        slope *= 1 - (capped / ask.form.cap) ** 2
    factor = ask.form.scale / ask.temperature
    return (slope if factor == 1.0 else slope.mul_(factor)).to(projected_TV.dtype)
