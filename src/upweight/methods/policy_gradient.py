"""The policy gradient that the online methods share: clipped ratios, KL, entropy and corrections for stale samples."""

from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from upweight.errors import UserError
from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import ReferenceSync, required, sequence_length, sequence_mean, sequence_sum
from upweight.methods.formulas import policy_losses
from upweight.methods.formulas.advantages import Scale
from upweight.methods.users.function import OPTIONS, OPTIONS_HELP, Call, UserFunction, bind
from upweight.methods.users.policy import ADVANTAGES, ESTIMATOR, LOSS, policy_term, refuse_unread
from upweight.methods.users.terms import POLICY
from upweight.settings import Section, setting
from upweight.types import Batch, Extreme, Loss, Mean, Metric, Outputs, Sample

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]

ENTROPY_TOLERANCE = 1e-5  # nats; what is nearer to the threshold than this counts as having reached it

DENOMINATOR: dict[str, str] = {
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), "sequences"),
    **dict.fromkeys(("dapo", "cispo", "vespo"), "rollout_tokens"),
    "bnpo": "tokens",
}


class PolicyGradient(Section):
    """Settings, traits and loss of a policy gradient on sampled completions; GRPO, GDPO and EBFT add advantages."""

    data: ClassVar = "prompts"
    online: ClassVar[bool] = True
    lora_learning_rate: ClassVar[float | None] = 1e-5
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T"})

    num_generations: int = setting("trl.num_generations", 8, "Completions sampled for each prompt.", ge=1)
    max_completion_length: int = setting(
        "trl.max_completion_length", 256, "Most tokens a completion may have; also the divisor of dr_grpo.", ge=1
    )
    mask_truncated_completions: bool = setting(
        "trl.mask_truncated_completions", False, "Leave completions that hit the length limit out of the loss."
    )
    beta: float = setting("trl.beta", 0.0, "Weight of the KL; 0 needs no reference model.", also=("rl_beta",), ge=0)
    loss_type: LossType | UserFunction = setting(LOSS, "dapo", "Loss of a token, and its average; or your function.")
    method_args: dict[str, Any] = setting(OPTIONS, {}, OPTIONS_HELP)
    epsilon: float = setting("trl.epsilon", 0.2, "Policy ratios below 1 - epsilon are clipped.", ge=0)
    epsilon_high: float | None = setting("trl.epsilon_high", None, "Clip ratios above 1 + this; unset: epsilon.", ge=0)
    delta: float | None = setting("trl.delta", None, "Largest ratio at negative advantages; unset: no bound.", gt=0)
    importance_sampling_level: Literal["token", "sequence"] = setting(
        "trl.importance_sampling_level", "token", "Take the ratio of each token, or of the whole sequence (GSPO)."
    )
    advantage_estimator: Literal["group", "rloo"] | UserFunction = setting(
        ESTIMATOR, "group", "Baseline: mean of the group; of the other completions (rloo); or your function."
    )
    scale_rewards: bool | Literal["group", "batch", "none"] = setting(
        "trl.scale_rewards", "group", "Divide by the standard deviation of group (true) or batch, or do not (false)."
    )
    reward_weights: tuple[float, ...] | None = setting("trl.reward_weights", None, "Weight of each reward; unset: 1.")
    use_bias_correction_kl: bool = setting(
        "trl.use_bias_correction_kl", True, "Multiply the KL by the policy ratio, so that its gradient is unbiased."
    )
    off_policy_mask_threshold: float | None = setting(
        "trl.off_policy_mask_threshold",
        None,
        "Drop sequences of negative advantage whose mean log-prob fell by more than this since sampling.",
    )
    teacher_kl_coef: float = setting(
        "trl.teacher_kl_coef",
        0.0,
        "Weight of log(teacher / sampler probability) of each token, added to its advantage.",
        ge=0,
    )
    top_entropy_quantile: float = setting(
        "trl.top_entropy_quantile", 1.0, "Share of tokens, the most uncertain ones, that are trained on.", gt=0, le=1
    )
    entropy_coef: float = setting("trl.entropy_coef", 0.0, "Weight of the bonus on the policy's entropy.", ge=0)
    sapo_temperature_pos: float = setting(
        "trl.sapo_temperature_pos", 1.0, "Steepness of the sapo gate where the advantage is positive.", gt=0
    )
    sapo_temperature_neg: float = setting(
        "trl.sapo_temperature_neg", 1.05, "Steepness of the sapo gate where the advantage is negative.", gt=0
    )
    vespo_k_pos: float = setting("trl.vespo_k_pos", 2.0, "Exponent k of vespo's weight, advantage > 0.", ge=0)
    vespo_lambda_pos: float = setting(
        "trl.vespo_lambda_pos", 3.0, "Decay lambda of vespo's weight w^k exp(lambda (1 - w)), advantage > 0.", ge=0
    )
    vespo_k_neg: float = setting("trl.vespo_k_neg", 3.0, "Exponent k of vespo's weight, advantage < 0.", ge=0)
    vespo_lambda_neg: float = setting(
        "trl.vespo_lambda_neg", 2.0, "Decay lambda of vespo's weight w^k exp(lambda (1 - w)), advantage < 0.", ge=0
    )
    sampler_correction: bool | None = setting(
        "trl.vllm_importance_sampling_correction",
        None,
        "Weight tokens by the trainer's probability over the sampler's; unset: if the two differ.",
    )
    sampler_correction_mode: CorrectionMode | None = setting(
        "trl.vllm_importance_sampling_mode", None, "Cap or drop large weights; unset: cap, at the ratio's level."
    )
    sampler_correction_cap: float = setting(
        "trl.vllm_importance_sampling_cap",
        3.0,
        "Largest weight.",
        also=("trl.vllm_importance_sampling_clip_max",),
        gt=0,
    )
    sampler_correction_floor: float | None = setting(
        "trl.vllm_importance_sampling_clip_min", None, "Smallest weight; unset: no bound.", ge=0
    )
    sync_ref_model: bool = setting("trl.sync_ref_model", False, "Move the reference towards the policy while training.")
    ref_model_mixup_alpha: float = setting(
        "trl.ref_model_mixup_alpha", 0.6, "Policy's share in an update of it.", ge=0, le=1
    )
    ref_model_sync_steps: int = setting(
        "trl.ref_model_sync_steps", 512, "Steps between updates of the reference.", ge=1
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if self.num_generations < 2 and not self.teacher_kl_coef:
            raise ValueError("trl.num_generations: 1 completion has no others to compare with: at least 2")
        if self.sync_ref_model and self.beta == 0:
            raise ValueError("trl.sync_ref_model needs a reference: set trl.beta above 0")
        if self.loss_type == "vespo" and (self.sampler_correction_mode or "token").startswith("sequence"):
            raise ValueError(
                "trl.loss_type: vespo weighs whole sequences itself: set trl.vllm_importance_sampling_mode to "
                "token_truncate or token_mask"
            )
        if self.sampler_correction_floor is not None and self.sampler_correction_floor > self.sampler_correction_cap:
            raise ValueError("trl.vllm_importance_sampling_clip_min must not be above trl.vllm_importance_sampling_cap")
        if call := self.calls.get(LOSS):
            refuse_unread(self, call)
        return self

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The user's loss and advantages, by their keys."""
        functions = [(LOSS, self.loss_type, POLICY), (ESTIMATOR, self.advantage_estimator, ADVANTAGES)]
        return bind(functions, self.method_args, type(self).model_fields)

    @property
    def loss_function(self) -> Call | None:
        return self.calls.get(LOSS)

    @property
    def advantage_function(self) -> Call | None:
        return self.calls.get(ESTIMATOR)

    @property
    def online_settings(self) -> Self:
        return self

    @property
    def group_size(self) -> int:
        return self.num_generations

    @property
    def needs_reference(self) -> bool:
        return self.adds_kl or self.needs_kl_in_reward or self._loss_asks("ref_logps")

    @property
    def adds_kl(self) -> bool:
        """Whether the KL is added to the loss; a user's loss that asks for `beta` has it already."""
        return self.beta > 0 and not self._loss_asks("beta")

    @property
    def needs_kl_in_reward(self) -> bool:
        return self.advantage_function is not None and "log_ratio" in self.advantage_function.asks

    @property
    def reads_versions(self) -> bool:
        return self._loss_asks("versions", "lag")

    def _loss_asks(self, *names: str) -> bool:
        return LOSS in self.calls and any(name in self.calls[LOSS].asks for name in names)

    @property
    def needs_teacher(self) -> bool:
        return self.teacher_kl_coef > 0

    @property
    def needs_rewards(self) -> bool:
        return not self.teacher_kl_coef

    @property
    def teacher_advantage(self) -> float:
        return self.teacher_kl_coef

    @property
    def reference_sync(self) -> ReferenceSync | None:
        return ReferenceSync(self.ref_model_mixup_alpha, self.ref_model_sync_steps) if self.sync_ref_model else None

    @property
    def needs_preparation(self) -> bool:
        """Whether `loss` needs the entropy threshold of the whole step."""
        return self.top_entropy_quantile < 1

    @property
    def correction_mode(self) -> CorrectionMode:
        """How sampler corrections are bounded, with the unset value resolved."""
        if self.sampler_correction_mode is not None:
            return self.sampler_correction_mode
        by_sequence = self.importance_sampling_level == "sequence" and self.loss_type != "vespo"
        return "sequence_truncate" if by_sequence else "token_truncate"

    @property
    def reward_scale(self) -> Scale:
        """What advantages are divided by, with true and false resolved to names."""
        if isinstance(self.scale_rewards, bool):
            return "group" if self.scale_rewards else "none"
        return self.scale_rewards

    def refuse_for_decoupled_rewards(self, otherwise: str) -> None:
        """Raise for settings without effect where each reward is normalised separately; `otherwise` is the remedy."""
        if self.advantage_estimator != "group":
            name = self.advantage_estimator
            raise ValueError(f"trl.advantage_estimator: {name} has no place where rewards are normalised; {otherwise}")
        if self.reward_scale != "group":
            raise ValueError(
                f"trl.scale_rewards: {self.reward_scale} has no effect where each reward is divided by the deviation "
                f"of its group; remove it, or {otherwise}"
            )

    def count(self, batch: Batch) -> dict[str, Tensor]:
        sampled_S = is_sampled(batch)
        tokens = sampled_S[batch.sequence_T].sum().float()
        sequences = (sampled_S if batch.share_S is None else sampled_S * batch.share_S).sum().float()
        counts = {name: sequences if name == "sequences" else tokens for name in self._denominators}
        return counts | {"tokens": tokens} if self.entropy_coef else counts

    def contributes(self, sample: Sample) -> bool:
        return bool(
            sample.loss_mask.any() and (sample.has_advantage or self.zero_advantage_reasons or sample.label == 1)
        )

    @property
    def _denominators(self) -> tuple[str, ...]:
        """What terms are divided by; those of a user's loss by either, as it returns them."""
        return ("rollout_tokens", "sequences") if LOSS in self.calls else (DENOMINATOR[str(self.loss_type)],)

    @property
    def zero_advantage_reasons(self) -> list[str]:
        """The settings that require a forward of completions without an advantage too."""
        loss = self.calls[LOSS].function.function if LOSS in self.calls else None
        enabled = {
            LOSS: loss is not None and not getattr(loss, "skip_zero_advantage", False),
            "trl.beta": self.beta > 0,
            "trl.entropy_coef": self.entropy_coef > 0,
            "trl.top_entropy_quantile": self.needs_preparation,
        }
        return [name for name, on in enabled.items() if on]

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the entropies of the sampled tokens, NaN for all other tokens."""
        if not self.needs_preparation:
            return {}
        sampled_T = is_sampled(batch)[batch.sequence_T]
        return {"entropy": required(out.entropy_T).detach().float().masked_fill(~sampled_T, float("nan"))}

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entropy threshold of the most uncertain tokens, and the fraction of tokens above it."""
        if not self.needs_preparation:
            return {}
        entropy = collected.get("entropy", torch.zeros(0))  # none where nothing of the step is scored
        entropy = entropy[~entropy.isnan()]
        if not len(entropy):
            return {"entropy_threshold": entropy.new_zeros(()), "entropy_share": entropy.new_ones(())}
        # Equal entropies of different forwards are rounded differently, and have to stay on the same side.
        threshold = policy_losses.quantile(entropy, 1 - self.top_entropy_quantile) - ENTROPY_TOLERANCE
        return {"entropy_threshold": threshold, "entropy_share": (entropy >= threshold).float().mean()}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T, sampled_T = required(out.logps_T), is_sampled(batch)[batch.sequence_T]
        old_T = logps_T.detach()
        if batch.old_logps_T is not None:
            old_T = torch.where(sampled_T, batch.old_logps_T, old_T)
        log_ratio_T = logps_T - old_T
        if self.importance_sampling_level == "sequence":
            mean_T = sequence_mean(log_ratio_T, batch)[batch.sequence_T]
            # GSPO-token: the same ratio, but each token's advantage moves that token alone.
            log_ratio_T = mean_T if batch.advantage_T is None else mean_T.detach() + logps_T - logps_T.detach()
        ratio_T = log_ratio_T.exp()
        correction_T, metrics = self._sampler_correction(old_T, batch)
        by_sequence = self.loss_type in ("grpo", "sapo")
        if call := self.calls.get(LOSS):
            loss_T, by_sequence, more_metrics = policy_term(
                call, self, out, batch, is_sampled(batch), old_T, correction_T
            )
            if by_sequence and self.needs_preparation:
                raise UserError("trl.top_entropy_quantile: picks tokens, and your loss returns a term by sequence.")
        else:
            loss_T, more_metrics = self._surrogate_loss(logps_T, old_T, ratio_T, correction_T, batch)
        metrics |= more_metrics
        metrics["entropy"] = Mean.over(required(out.entropy_T), sampled_T)

        top_T = sampled_T
        if self.needs_preparation:
            top_T = sampled_T & (required(out.entropy_T) >= prepared["entropy_threshold"])
        loss_T = torch.where(top_T, loss_T, 0.0)
        if self.needs_reference:
            kl_T = policy_losses.reference_kl(logps_T, required(out.ref_logps_T))
            metrics = {"kl": Mean.over(kl_T, sampled_T), **metrics}  # a user's own of this name stays
            if self.adds_kl:
                loss_T = loss_T + self.beta * sampled_T * (kl_T * ratio_T if self.use_bias_correction_kl else kl_T)

        if by_sequence:
            length_S = sequence_length(batch)
            # Segments of one completion have one mean over all their tokens.
            length_S = length_S if batch.share_S is None else length_S / batch.share_S.clamp(min=1e-9)
            loss_T = loss_T / length_S[batch.sequence_T]
        if self.loss_type == "dr_grpo":
            loss_T = loss_T / self.max_completion_length
        sums = {name: 0 * loss_T.sum() for name in self._denominators}
        sums[self._denominators[by_sequence and len(sums) > 1]] = loss_T.sum()
        if self.entropy_coef:
            bonus = self.entropy_coef * (required(out.entropy_T) * top_T).sum() / prepared.get("entropy_share", 1.0)
            sums["tokens"] = sums.get("tokens", 0.0) - bonus
        return Loss(sums, metrics)

    def _sampler_correction(self, old_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """Return the importance weight of each token for the mismatch of sampler and trainer, and its metrics."""
        sampled_T = is_sampled(batch)[batch.sequence_T]
        metrics = policy_losses.gap_metrics(old_T, batch, sampled_T)
        if batch.sampler_logps_T is None or self.sampler_correction is False:
            return torch.ones_like(old_T), metrics
        gap_T = policy_losses.sampler_gap(old_T, batch.sampler_logps_T)
        floor, cap = self.sampler_correction_floor, self.sampler_correction_cap
        correction_T = policy_losses.sampler_correction(gap_T, batch, self.correction_mode, floor, cap)
        return correction_T, metrics | {
            "sampling/sampling_logp_difference/mean": Mean.over(gap_T.abs(), sampled_T),
            "sampling/sampling_logp_difference/max": Extreme.over(gap_T.abs(), sampled_T),
            "sampling/importance_sampling_ratio/min": Extreme.over(correction_T, sampled_T, sign=-1),
            "sampling/importance_sampling_ratio/mean": Mean.over(correction_T, sampled_T),
            "sampling/importance_sampling_ratio/max": Extreme.over(correction_T, sampled_T),
        }

    def _surrogate_loss(
        self, logps_T: Tensor, old_T: Tensor, ratio_T: Tensor, correction_T: Tensor, batch: Batch
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the policy loss of each token, corrected for the sampler, and its metrics."""
        sampled_S = is_sampled(batch)
        sampled_T = sampled_S[batch.sequence_T]
        advantage_T = batch.advantage_T
        if advantage_T is None:
            advantage_T = required(batch.advantage_S)[batch.sequence_T]
        advantage_T = torch.where(sampled_T, advantage_T, 0.0)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        metrics: dict[str, Metric] = {}
        if self.loss_type == "vespo":
            log_weight_S = sequence_sum((logps_T - old_T).detach().clamp(-20, 20) + correction_T.log(), batch)
            positive, negative = (self.vespo_k_pos, self.vespo_lambda_pos), (self.vespo_k_neg, self.vespo_lambda_neg)
            weight_T = policy_losses.vespo_weight(log_weight_S[batch.sequence_T], advantage_T, positive, negative)
            metrics["vespo/phi_seq_mean"] = Mean.over(sequence_mean(weight_T, batch), sampled_S)
            loss_T = -weight_T * advantage_T * logps_T
        elif self.loss_type == "cispo":
            metrics["cispo_clip_ratio"] = Mean.over((ratio_T > 1 + high) & (advantage_T > 0), sampled_T)
            loss_T = correction_T * policy_losses.cispo(logps_T, ratio_T, advantage_T, high)
        elif self.loss_type == "sapo":
            temperatures = self.sapo_temperature_pos, self.sapo_temperature_neg
            loss_T = correction_T * policy_losses.sapo(ratio_T, advantage_T, *temperatures)
        else:
            metrics |= policy_losses.clip_metrics(ratio_T, advantage_T, sampled_T, self.epsilon, high, batch=batch)
            loss_T = correction_T * policy_losses.clipped(ratio_T, advantage_T, self.epsilon, high, self.delta)

        if self.off_policy_mask_threshold is not None:
            sampler_T = old_T if batch.sampler_logps_T is None else batch.sampler_logps_T
            log_ratio_S = sequence_mean(-policy_losses.sampler_gap(logps_T, sampler_T), batch)
            kept_T = (advantage_T >= 0) | (log_ratio_S <= self.off_policy_mask_threshold)[batch.sequence_T]
            metrics["sampling/off_policy_kept"] = Mean.over(sequence_mean(kept_T.float(), batch), sampled_S)
            loss_T = loss_T * kept_T
        return loss_T, metrics


class RewardToGo(Section):
    """The settings of a policy gradient that may credit each token with the rewards from it on."""

    reward_to_go: bool = setting("trl.reward_to_go", False, "Credit each token only with the rewards at or after it.")
    gamma: float = setting(
        "trl.gamma", 1.0, "With `trl.reward_to_go`: discount of a reward for each token before it.", gt=0, le=1
    )

    @model_validator(mode="after")
    def _discount_has_rewards(self) -> Self:
        if self.gamma != 1 and not self.reward_to_go:
            raise ValueError("trl.gamma discounts rewards that follow a token: set trl.reward_to_go: true")
        return self

    @property
    def discount(self) -> float | None:
        return self.gamma if self.reward_to_go else None


def is_sampled(batch: Batch) -> Tensor:
    """Return True for sequences sampled from the policy; demonstrations have label 1."""
    if batch.label_S is None:
        return torch.ones(batch.num_sequences, dtype=torch.bool, device=batch.sequence_T.device)
    return batch.label_S == 0
