"""KTO: Kahneman-Tversky Optimization (arXiv:2402.01306), on completions labelled good or bad."""

from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import Method, WithReference, required, reward_metrics, sequence_sum
from upweight.methods.users import terms
from upweight.methods.users.cut import warn_if_cut_matters
from upweight.methods.users.function import OPTIONS, OPTIONS_HELP, Call, UserFunction, bind
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs, Sample

LOSS = "kto_loss_type"
KL_BATCH = 8  # answers of a step, below which the KL estimate is noisy; 1 has no other answer to be paired with


class KTO(WithReference, Method):
    """Gains and losses of single completions, measured from the policy's log-ratio to the reference."""

    name: ClassVar[str] = "kto"
    data: ClassVar = "labelled"
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T", "mean_logit_T"})

    beta: float = setting("rl_beta", 0.1, "Strength of the pull towards the reference model.", also=("trl.beta",), gt=0)
    desirable_weight: float = setting("kto_desirable_weight", 1.0, "Weight of the desirable completions.", ge=0)
    undesirable_weight: float = setting("kto_undesirable_weight", 1.0, "Weight of the undesirable completions.", ge=0)
    loss_type: Literal["kto", "apo_zero_unpaired"] | UserFunction = setting(
        LOSS, "kto", "Gains are measured from the estimated KL (kto) or from 0 (apo_zero_unpaired); or your function."
    )
    method_args: dict[str, Any] = setting(OPTIONS, {}, OPTIONS_HELP)
    kl: Literal["rotate", "all"] = setting(
        "kto_kl", "rotate", "Pairs of the KL estimate: a prompt with the next one's completion (rotate) or all (all)."
    )

    @model_validator(mode="after")
    def _reference_can_be_known(self) -> "KTO":
        if self.precompute_ref_log_probs and self.estimates_kl:
            raise ValueError(
                "precompute_ref_log_probs: KTO's KL estimate needs the reference on pairs that only form while "
                "training. Drop the key, or set 'kto_loss_type: apo_zero_unpaired', which needs no estimate."
            )
        return self

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The user's loss, by its key."""
        return bind([(LOSS, self.loss_type, terms.LABELLED)], self.method_args, type(self).model_fields)

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss reads the KL that mismatched completions estimate."""
        return "kl" in self.calls[LOSS].asks if LOSS in self.calls else self.loss_type == "kto"

    @property
    def mismatched(self) -> Literal["rotate", "all"] | None:
        return self.kl if self.estimates_kl else None

    @property
    def default_batch(self) -> int:
        return KL_BATCH if self.loss_type == "kto" else 1

    @property
    def label_weights(self) -> dict[bool, float] | None:
        return {True: self.desirable_weight, False: self.undesirable_weight}

    @property
    def needs_preparation(self) -> bool:
        return self.estimates_kl

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return {"sequences": (required(batch.label_S) >= 0).sum().float()}

    def counts_for_routers(self, sample: Sample) -> bool:
        return sample.label != -1  # the KL's mismatched completions have no gradient

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        mismatched_S = required(batch.label_S) < 0
        log_ratio = Mean.over(sequence_sum(required(out.logps_T) - required(out.ref_logps_T), batch), mismatched_S)
        return {"kl_total": log_ratio.total[None], "kl_weight": log_ratio.weight[None]}

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.estimates_kl:
            return {}
        kl = collected["kl_total"].sum() / collected["kl_weight"].sum().clamp(min=1)
        return {"kl": kl.clamp(min=0)}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        log_ratio_S = sequence_sum(required(out.logps_T) - required(out.ref_logps_T), batch)
        label_S = required(batch.label_S)
        good_S, bad_S = label_S == 1, label_S == 0
        if call := self.calls.get(LOSS):
            loss_S, user_metrics = self._user_term(call, log_ratio_S, out, batch, prepared)
        else:
            origin = prepared["kl"] if self.estimates_kl else 0.0
            value_S = torch.sigmoid(self.beta * torch.where(good_S, log_ratio_S - origin, origin - log_ratio_S))
            loss_S, user_metrics = 1 - value_S, {}
        weight_S = self.desirable_weight * good_S + self.undesirable_weight * bad_S
        metrics = self._metrics(out, batch, self.beta * log_ratio_S, good_S, bad_S)
        if self.estimates_kl:
            metrics["kl"] = Mean.of(prepared["kl"].expand_as(log_ratio_S))  # weighs as much however a step is cut
        return Loss({"sequences": (weight_S * loss_S).sum()}, metrics | user_metrics)

    def _user_term(
        self, call: Call, log_ratio_S: Tensor, out: Outputs, batch: Batch, prepared: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Mean]]:
        """Return the user's term of each labelled completion, 0 of mismatched ones, and its metrics."""
        label_S, pad = required(batch.label_S), terms.Padded(batch)
        labelled_S = label_S >= 0
        values = terms.token_values(pad, out, batch, labelled_S[batch.sequence_T]) | {
            "log_ratio": lambda: log_ratio_S,
            "desirable": lambda: label_S == 1,
            "kl": lambda: prepared["kl"],
        }
        term_S, metrics = terms.checked_term(call, call(values, self), out, sequences=pad.shape[:1])
        terms.require_finite(call, term_S, labelled_S)
        warn_if_cut_matters(call, values, self, term_S, labelled_S)
        return torch.where(labelled_S, term_S, 0.0), {
            name: Mean.over(value, labelled_S) for name, value in metrics.items()
        }

    def _metrics(self, out: Outputs, batch: Batch, reward_S: Tensor, good_S: Tensor, bad_S: Tensor) -> dict[str, Mean]:
        logps_S = sequence_sum(required(out.logps_T), batch)
        mean_logit_T, sequence_T = required(out.mean_logit_T), batch.sequence_T
        compared = {} if batch.pair_P2 is None else reward_metrics(*reward_S[batch.pair_P2].unbind(1))
        return {
            **compared,
            "rewards/chosen": Mean.over(reward_S, good_S),
            "rewards/rejected": Mean.over(reward_S, bad_S),
            "logps/chosen": Mean.over(logps_S, good_S),
            "logps/rejected": Mean.over(logps_S, bad_S),
            "logits/chosen": Mean.over(mean_logit_T, good_S[sequence_T]),
            "logits/rejected": Mean.over(mean_logit_T, bad_S[sequence_T]),
            "entropy": Mean.over(required(out.entropy_T), (good_S | bad_S)[sequence_T]),
        }
