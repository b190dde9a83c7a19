"""RLOO: REINFORCE Leave-One-Out (arXiv:2402.14740), on whole completions, with the KL in the reward."""

from typing import ClassVar

from pydantic import model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import Method, ReferenceSync, required, sequence_sum
from upweight.methods.formulas.advantages import group_statistics, normalised, weighted_reward
from upweight.methods.formulas.policy_losses import clip_metrics, clipped, gap_metrics
from upweight.methods.policy_gradient import PolicyGradient, is_sampled
from upweight.settings import same_setting, setting
from upweight.types import Batch, Loss, Mean, Outputs, Sample


class RLOO(Method):
    """A policy gradient on completions as single actions; the baseline is the prompt's other completions."""

    name: ClassVar[str] = "rloo"
    data: ClassVar = "prompts"
    reads: ClassVar[frozenset[str]] = frozenset({"entropy_T"})
    online: ClassVar[bool] = True
    lora_learning_rate: ClassVar[float | None] = 1e-5

    num_generations: int = setting("trl.num_generations", 2, "Completions sampled for each prompt.", ge=2)
    max_completion_length: int = same_setting(PolicyGradient, "max_completion_length")
    mask_truncated_completions: bool = same_setting(PolicyGradient, "mask_truncated_completions")
    beta: float = setting(
        "trl.beta",
        0.05,
        "Weight of the KL, which is subtracted from rewards; 0 needs no reference model.",
        also=("rl_beta",),
        ge=0,
    )
    epsilon: float = same_setting(PolicyGradient, "epsilon")
    epsilon_high: float | None = same_setting(PolicyGradient, "epsilon_high")
    reward_weights: tuple[float, ...] | None = same_setting(PolicyGradient, "reward_weights")
    reward_clip_range: tuple[float, float] | None = setting(
        "trl.reward_clip_range", None, "Smallest and largest value of a weighted reward. When left out: no bounds."
    )
    normalize_advantages: bool = setting(
        "trl.normalize_advantages", False, "Shift and scale the advantages of a rollout to mean 0 and deviation 1."
    )
    sync_ref_model: bool = same_setting(PolicyGradient, "sync_ref_model")
    ref_model_mixup_alpha: float = same_setting(PolicyGradient, "ref_model_mixup_alpha")
    ref_model_sync_steps: int = same_setting(PolicyGradient, "ref_model_sync_steps")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "RLOO":
        if self.sync_ref_model and self.beta == 0:
            raise ValueError("trl.sync_ref_model needs a reference: set trl.beta above 0")
        if self.reward_clip_range is not None and self.reward_clip_range[0] > self.reward_clip_range[1]:
            raise ValueError("trl.reward_clip_range: the first bound is above the second")
        return self

    @property
    def online_settings(self) -> "RLOO":
        return self

    @property
    def sampler_correction(self) -> bool:
        """Off: ratios compare with the policy that scored the rollout."""
        return False

    @property
    def off_policy_mask_threshold(self) -> None:
        return None

    @property
    def zero_advantage_reasons(self) -> list[str]:
        """Nothing: the KL is part of the reward, so completions without an advantage have no gradient."""
        return []

    @property
    def reference_sync(self) -> ReferenceSync | None:
        return ReferenceSync(self.ref_model_mixup_alpha, self.ref_model_sync_steps) if self.sync_ref_model else None

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    @property
    def needs_kl_in_reward(self) -> bool:
        return self.beta > 0

    @property
    def group_size(self) -> int:
        return self.num_generations

    def count(self, batch: Batch) -> dict[str, Tensor]:
        sampled_S = is_sampled(batch)
        return {"sequences": (sampled_S if batch.share_S is None else sampled_S * batch.share_S).sum().float()}

    def contributes(self, sample: Sample) -> bool:
        return bool(sample.loss_mask.any()) and bool(sample.advantage)

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        reward_S = weighted_reward(rewards_SR, self.reward_weights)
        if self.reward_clip_range is not None:
            reward_S = reward_S.clamp(*self.reward_clip_range)
        if log_ratio_S is not None:
            reward_S = reward_S - self.beta * log_ratio_S
        mean_S, _, size_S = group_statistics(reward_S, group_S)
        advantage_S = (reward_S - mean_S) * size_S / (size_S - 1)  # a group of one has no baseline
        advantage_S = advantage_S.masked_fill(size_S < 2, float("nan"))
        if self.normalize_advantages:
            return normalised(advantage_S, torch.zeros_like(group_S), "batch")
        return advantage_S.nan_to_num(0.0).float()

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T, sampled_S = required(out.logps_T), is_sampled(batch)
        sampled_T = sampled_S[batch.sequence_T]
        old_T = logps_T.detach()
        if batch.old_logps_T is not None:
            old_T = torch.where(sampled_T, batch.old_logps_T, old_T)
        ratio_S = sequence_sum(logps_T - old_T, batch).exp()
        advantage_S = torch.where(sampled_S, required(batch.advantage_S), 0.0)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        scored_S = sequence_sum(torch.ones_like(logps_T), batch) > 0
        loss_S = clipped(ratio_S, advantage_S, self.epsilon, high, None) * scored_S
        if batch.share_S is not None:
            loss_S = loss_S * batch.share_S
        metrics = clip_metrics(ratio_S, advantage_S, sampled_S, self.epsilon, high)
        metrics |= gap_metrics(old_T, batch, sampled_T)
        metrics["entropy"] = Mean.over(required(out.entropy_T), sampled_T)
        if self.beta:
            metrics["kl"] = Mean.over(old_T - required(out.ref_logps_T), sampled_T)
        return Loss({"sequences": loss_S.sum()}, metrics)
