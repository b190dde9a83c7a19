"""DPO: Direct Preference Optimization (arXiv:2305.18290), its fifteen losses and users', alone or weighted."""

from functools import cached_property
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import (
    Method,
    WithReference,
    is_chosen,
    pair_counts,
    pair_metrics,
    position_in_sequence,
    required,
    sequence_length,
    sequence_mean,
    sequence_sum,
)
from upweight.methods.formulas import dpo_losses
from upweight.methods.formulas.dpo_losses import Divergence, LossType
from upweight.methods.users import terms
from upweight.methods.users.cut import warn_if_cut_matters
from upweight.methods.users.function import OPTIONS, OPTIONS_HELP, Call, UserFunction, bind
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs

LOSS = "dpo_loss_type"


class DPO(WithReference, Method):
    """The chosen completion should gain more over the reference than the rejected one."""

    name: ClassVar[str] = "dpo"
    data: ClassVar = "pairs"
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T", "mean_logit_T", "is_top_T"})

    beta: float = setting("rl_beta", 0.1, "Strength of the pull towards the reference model.", also=("trl.beta",), gt=0)
    loss_type: tuple[LossType | UserFunction, ...] = setting(
        LOSS, ("sigmoid",), "Losses that are added up; among them your functions.", min_length=1
    )
    method_args: dict[str, Any] = setting(OPTIONS, {}, OPTIONS_HELP)
    loss_weights: tuple[float, ...] | None = setting(
        "dpo_loss_weights", None, "Weight of each loss. When left out: 1 each."
    )
    label_smoothing: float = setting(
        "dpo_label_smoothing", 0.0, "Assumed share of pairs whose chosen and rejected are swapped (cDPO).", ge=0, lt=0.5
    )
    use_weighting: bool = setting(
        "dpo_use_weighting", False, "Weight pairs by their probability under the policy (WPO)."
    )
    ld_alpha: float | None = setting(
        "ld_alpha",
        None,
        "Weight of tokens beyond the length of the shorter completion (LD-DPO). When left out: 1.",
        ge=0,
        le=1,
    )
    divergence: Divergence = setting("f_divergence_type", "reverse_kl", "Divergence that the reward is derived from.")
    divergence_alpha: float = setting("f_alpha_divergence_coef", 0.5, "Order of the alpha divergence; 1 is reverse KL.")
    discopop_tau: float = setting("discopop_tau", 0.05, "Temperature of the gate in the discopop loss.", gt=0)

    @field_validator("loss_type", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else (value,)

    @model_validator(mode="after")
    def _losses_fit_together(self) -> "DPO":
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            given_weights, losses = len(self.loss_weights), len(self.loss_type)
            raise ValueError(f"dpo_loss_weights has {given_weights} entries for {losses} losses in dpo_loss_type")
        if "exo_pair" in self.loss_type and self.label_smoothing == 0:
            raise ValueError("dpo_loss_type: exo_pair needs dpo_label_smoothing above 0, for example 0.001")
        asked = any("label_smoothing" in call.asks for call in self.calls.values())
        if self.label_smoothing > 0 and not asked and not dpo_losses.SMOOTHED & set(self.loss_type):
            names = ", ".join(map(str, self.loss_type))
            raise ValueError(f"dpo_label_smoothing has no effect on {names}; remove it")
        unfit = sorted(map(str, set(self.loss_type) - dpo_losses.DIVERGENT - {"sft"}))
        if self.divergence != "reverse_kl" and unfit:
            raise ValueError(f"f_divergence_type: {self.divergence} does not go with dpo_loss_type {', '.join(unfit)}")
        return self

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The users' losses, by their keys: `dpo_loss_type[0]` and so on."""
        functions = [(_key(number), one, terms.PAIRS) for number, one in enumerate(self.loss_type)]
        return bind(functions, self.method_args, type(self).model_fields)

    @property
    def statistics(self) -> frozenset[str]:
        return self.reads | {"log_collision_T"} if self.use_weighting else self.reads

    @property
    def needs_preparation(self) -> bool:
        return bool({"aot", "aot_unpaired"} & set(self.loss_type))

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return pair_counts(batch, likelihood="sft" in self.loss_type)

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        return dpo_losses.step_values(self.loss_type, *self._pair_log_probs(out, batch))

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: values.detach().sort().values for name, values in collected.items()}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        policy_P2, ref_P2 = self._pair_log_probs(out, batch)
        pairs = dpo_losses.Pairs(
            policy_P2,
            ref_P2,
            score_P2=dpo_losses.divergence_score(policy_P2 - ref_P2, self.divergence, self.divergence_alpha),
            length_P2=sequence_length(batch)[required(batch.pair_P2)],
            beta=self.beta,
            smoothing=self.label_smoothing,
            tau=self.discopop_tau,
            sorted=prepared,
        )
        weights = self.loss_weights or (1.0,) * len(self.loss_type)
        loss_P, sft_weight, user_metrics = torch.zeros_like(policy_P2[:, 0]), 0.0, {}
        for number, (name, weight) in enumerate(zip(self.loss_type, weights, strict=True)):
            if name == "sft":
                sft_weight += weight
            elif call := self.calls.get(_key(number)):
                values = terms.pair_values(terms.Padded(batch), out, batch, policy_P2, ref_P2)
                term_P, metrics = terms.checked_term(call, call(values, self), out, pairs=tuple(loss_P.shape))
                every_P = torch.ones_like(term_P, dtype=torch.bool)
                terms.require_finite(call, term_P, every_P)
                warn_if_cut_matters(call, values, self, term_P, every_P)
                loss_P = loss_P + weight * term_P
                user_metrics |= {metric: Mean.of(value) for metric, value in metrics.items()}
            else:
                loss_P = loss_P + weight * dpo_losses.PAIR_LOSSES[str(name)](pairs)
        if self.use_weighting:
            # WPO: the policy's likelihood of both sides, normalised by the likelihood that it expects of itself.
            gap_T = (required(out.logps_T) - required(out.log_collision_T)).detach()
            loss_P = loss_P * sequence_mean(gap_T, batch)[required(batch.pair_P2)].sum(1).exp()
        sums = {"pairs": loss_P.sum()}
        if "sft" in self.loss_type:
            sums["tokens"] = -sft_weight * (required(out.logps_T) * is_chosen(batch)).sum()
        return Loss(sums, pair_metrics(*pairs.rewards, out, batch) | user_metrics)

    def _pair_log_probs(self, out: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return summed log-probs of policy and reference, each [P, 2]; `ld_alpha` weighs tokens of longer sides."""
        policy_T, ref_T, pair_P2 = required(out.logps_T), required(out.ref_logps_T), required(batch.pair_P2)
        if self.ld_alpha is not None:
            length_S = sequence_length(batch)
            shared_P2 = length_S[pair_P2].amin(1, keepdim=True).expand(-1, 2)
            shared_S = length_S.index_put((pair_P2.flatten(),), shared_P2.flatten())
            inside_T = position_in_sequence(batch) < shared_S[batch.sequence_T]
            weight_T = torch.where(inside_T, 1.0, self.ld_alpha)
            policy_T, ref_T = policy_T * weight_T, ref_T * weight_T
        return sequence_sum(policy_T, batch)[pair_P2], sequence_sum(ref_T, batch)[pair_P2]


def _key(number: int) -> str:
    return f"{LOSS}[{number}]"
