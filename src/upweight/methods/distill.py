"""Distillation: the policy learns a teacher's distribution, on the data's tokens or on tokens it samples itself."""

from typing import ClassVar, Literal

from pydantic import model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import Method, ReferenceSync, required, scalar
from upweight.methods.formulas.divergences import Tail, divergence, listed_logs
from upweight.methods.policy_gradient import PolicyGradient
from upweight.settings import same_setting, setting
from upweight.types import Batch, Divergence, Loss, Mean, Metric, Outputs

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
COMPARED = frozenset({
    "divergence_T", "forward_kl_T", "reverse_kl_T", "teacher_entropy_T", "teacher_logps_T", "agrees_T", "entropy_T",
})  # fmt: skip
LISTED = frozenset({"listed_logps_TK", "listed_tail_T", "agrees_T", "entropy_T"})
DEMONSTRATION = 1  # label of the data's completions among sampled ones


class Distill(Method):
    """Minimises a divergence from a teacher at every scored token, over the whole vocabulary or its likeliest part."""

    name: ClassVar[str] = "distill"
    evaluates_loss: ClassVar[bool] = True
    why_zero: ClassVar[str | None] = (
        "distill.teacher: the student equals its teacher at every token of the first step: there is nothing to learn. "
        "Name another teacher, or let it see more than the student (distill.privileged_prompt)."
    )
    lora_learning_rate: ClassVar[float | None] = 1e-5

    on_policy: float = setting(
        "distill.on_policy",
        1.0,
        "Share of rows for which the student samples the completion; 0: all completions are the data's.",
        ge=0,
        le=1,
    )
    seq_kd: bool = setting(
        "distill.seq_kd", False, "Let the teacher write the completions that the student does not sample."
    )
    privileged_prompt: str | None = setting(
        "distill.privileged_prompt", None, "What the teacher sees as prompt: a text with {columns}, or file.function."
    )
    self_weights: Literal["initial", "live", "ema"] = setting(
        "distill.self_weights",
        "initial",
        "With `distill.teacher: self`: initial weights, current ones (live), or a moving average (ema).",
    )
    ema_rate: float = setting(
        "distill.ema_rate", 0.05, "Share of the policy's weights in each update of the moving average.", gt=0, le=1
    )
    ema_steps: int = setting("distill.ema_steps", 1, "Steps between two updates of the moving average.", ge=1)
    divergence: Kind = setting("distill.divergence", "reverse_kl", "What is minimised at every token.")
    beta: float = setting(
        "distill.beta", 0.5, "Teacher's share of the mixture in jsd; 0 and 1 are forward_kl and reverse_kl.", ge=0, le=1
    )
    temperature: float = setting("distill.temperature", 1.0, "Divides the logits of both models in the loss.", gt=0)
    top_k: int | None = setting(
        "distill.top_k",
        None,
        "Compare only the teacher's most likely tokens, this many. When left out: the whole vocabulary.",
        ge=1,
    )
    tail: Tail = setting(
        "distill.tail",
        "bucket",
        "Tokens beyond `distill.top_k`: one bucket, dropped, or both sides are renormalised without them.",
    )
    coef: float = setting("distill.coef", 1.0, "Weight of the divergence.", ge=0)
    temperature_squared: bool = setting(
        "distill.temperature_squared", False, "Multiply the divergence by the square of its temperature."
    )
    ce_coef: float = setting("distill.ce_coef", 0.0, "Weight of the cross-entropy on the data's completions.", ge=0)
    max_completion_length: int = same_setting(PolicyGradient, "max_completion_length")
    mask_truncated_completions: bool = same_setting(PolicyGradient, "mask_truncated_completions")

    @model_validator(mode="after")
    def _terms_act(self) -> "Distill":
        if self.coef == 0 and self.ce_coef == 0:
            raise ValueError("distill.coef and distill.ce_coef are both 0: nothing is trained")
        if self.ce_coef and self.on_policy == 1:
            raise ValueError("distill.ce_coef is for the data's completions: set distill.on_policy below 1")
        if self.top_k == 1 and self.tail == "renormalise" and not self.ce_coef:
            raise ValueError(
                "distill.top_k: one renormalised token has probability 1 in both models, which teaches nothing: "
                "raise it, or set distill.tail: bucket"
            )
        return self

    @property
    def online(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] - a setting decides
        return self.on_policy > 0 or self.seq_kd or self.privileged_prompt is not None

    @property
    def data(self) -> Literal["text", "prompts"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "prompts" if self.online else "text"

    @classmethod
    def formats(cls) -> str:
        return "distill"

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    def needs_rewards(self) -> bool:
        return False

    @property
    def demonstration_share(self) -> float:
        return 1 - self.on_policy

    @property
    def teacher_writes(self) -> bool:
        return self.seq_kd

    @property
    def teacher_sees(self) -> str | None:
        return self.privileged_prompt

    @property
    def self_teacher(self) -> Literal["initial", "live", "ema"]:
        return self.self_weights

    @property
    def reference_sync(self) -> ReferenceSync | None:
        return ReferenceSync(self.ema_rate, self.ema_steps) if self.self_weights == "ema" else None

    @property
    def comparison(self) -> Divergence:
        return Divergence(self.kind, self.beta, self.temperature, summed=not self.ce_coef)

    @property
    def teacher_top_k(self) -> int | None:
        return self.top_k

    @property
    def reads_untaught(self) -> bool:
        return self.ce_coef > 0

    @property
    def kind(self) -> Kind:
        """The divergence, with the ends of jsd resolved to the two KLs."""
        ends: dict[float, Kind] = {0.0: "forward_kl", 1.0: "reverse_kl"}
        return ends.get(self.beta, "jsd") if self.divergence == "jsd" else self.divergence

    @property
    def statistics(self) -> frozenset[str]:
        return COMPARED if self.top_k is None else LISTED

    @property
    def online_settings(self) -> "Distill | None":
        return self if self.online else None

    @property
    def reward_weights(self) -> None:
        return None

    @property
    def sampler_correction(self) -> bool:
        """Off: no gradient flows through the sampling."""
        return False

    @property
    def off_policy_mask_threshold(self) -> None:
        return None

    @property
    def zero_advantage_reasons(self) -> list[str]:
        return []

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        return torch.zeros(len(group_S))

    def count(self, batch: Batch) -> dict[str, Tensor]:
        taught_T = batch.taught_T
        tokens = scalar(len(batch.sequence_T), batch) if taught_T is None else taught_T.sum().float()
        given = {"ce_tokens": self._given(batch).sum().float()} if self.ce_coef else {}
        return {"tokens": tokens, **given}

    def _given(self, batch: Batch) -> Tensor:
        """Return True for the tokens of the data's completions."""
        if batch.label_S is None:
            return torch.full_like(batch.sequence_T, not self.online, dtype=torch.bool)
        return (batch.label_S == DEMONSTRATION)[batch.sequence_T]

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        value_T, metrics = self._whole(out, batch) if self.top_k is None else self._listed(out, batch)
        metrics |= {
            "distill/divergence": _mean(value_T, batch),
            "distill/agreement": _mean(required(out.agrees_T), batch),
            "entropy": Mean.of(required(out.entropy_T)),
        }
        if batch.taught_T is not None:
            value_T = torch.where(batch.taught_T, value_T, 0.0)
        same_tokens = out.other_mass_T is None
        if same_tokens and out.teacher_logps_T is not None and self.temperature == 1:
            gain_T = out.teacher_logps_T - required(out.logps_T)
            metrics["distill/teacher_gain"] = Mean.over(gain_T, self._given(batch))
        weight = self.coef * (self.temperature**2 if self.temperature_squared else 1)
        sums = {"tokens": weight * value_T.sum()}
        if self.ce_coef:
            logps_T, given_T = required(out.logps_T), self._given(batch)
            sums["ce_tokens"] = -self.ce_coef * torch.where(given_T, logps_T, 0.0).sum()
            metrics["distill/ce_loss"] = Mean.over(-logps_T, given_T)
        return Loss(sums, metrics)

    def _whole(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """Return the divergence of each token over the whole vocabulary, and what is measured beside it."""
        forward_T, entropy_T = required(out.forward_kl_T), required(out.teacher_entropy_T)
        metrics: dict[str, Metric] = {
            "distill/forward_kl": _mean(forward_T, batch),
            "distill/reverse_kl": _mean(required(out.reverse_kl_T), batch),
            "distill/cross_entropy": _mean(forward_T + entropy_T, batch),
            "distill/teacher_entropy": _mean(entropy_T, batch),
        }
        if out.other_mass_T is not None:  # the teacher has another vocabulary
            metrics["distill/tail_mass"] = _mean(out.other_mass_T, batch)
            metrics["distill/teacher_tail_mass"] = _mean(required(out.teacher_other_mass_T), batch)
        return required(out.divergence_T), metrics

    def _listed(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """Return the divergence of each token over what the teacher lists, and what is measured beside it."""
        policy_TK, tail_T = required(out.listed_logps_TK), required(out.listed_tail_T)
        teacher = required(batch.teacher_logps_TK), batch.teacher_tail_T
        logs = listed_logs(policy_TK, tail_T, *teacher, self.tail)
        bucketed = listed_logs(policy_TK.detach(), tail_T.detach(), *teacher, "bucket")
        log_q, log_p, known = bucketed
        forward_T = divergence(*bucketed, "forward_kl", self.beta)
        return divergence(*logs, self.kind, self.beta), {
            "distill/forward_kl": Mean.of(forward_T),
            "distill/reverse_kl": Mean.of(divergence(*bucketed, "reverse_kl", self.beta)),
            "distill/cross_entropy": Mean.of(-(log_p.exp() * known * log_q).sum(-1)),
            "distill/tail_mass": Mean.of(tail_T.exp()),
            "distill/teacher_tail_mass": Mean.of(log_p[:, -1].exp()),
        }


def _mean(values: Tensor, batch: Batch) -> Mean:
    """Return the mean over the tokens that are compared."""
    return Mean.of(values) if batch.taught_T is None else Mean.over(values, batch.taught_T)
