"""EBFT: Energy-Based Fine-Tuning (arXiv:2603.12248): sampled text is rewarded for the features of true text."""

from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from upweight.methods.advantages import leave_one_out, normalised, weighted_reward
from upweight.methods.base import Method, given
from upweight.methods.policy_gradient import PolicyGradient, is_sampled
from upweight.settings import inline, setting
from upweight.types import Batch, Loss, Mean, Outputs, Sample


class EBFT(Method):
    """Feature matching by policy gradient, with an optional likelihood term on the demonstrations."""

    name: ClassVar[str] = "ebft"
    data: ClassVar = "prompts"
    online: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 1e-6

    policy: PolicyGradient = inline(PolicyGradient)
    feature_layers: tuple[Annotated[float, Field(ge=0, le=1)], ...] = setting(
        "ebft.feature_layers",
        (0.25, 0.5, 0.75),
        "Depths, as fractions of the layers, whose hidden states make up the features.",
        min_length=1,
    )
    embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = setting(
        "ebft.embed_method", "last_token", "How the hidden states of a text become one feature vector."
    )
    use_whitening: bool = setting(
        "ebft.use_whitening", False, "Whiten the features, so that no direction dominates the rewards."
    )
    alignment_coef: float = setting(
        "ebft.alignment_coef", 1.0, "Weight of the similarity to the true completion's features.", ge=0
    )
    diversity_coef: float = setting(
        "ebft.diversity_coef", 1.0, "Weight of the penalty on features that samples of one prompt share.", ge=0
    )
    ce_coef: float = setting("ebft.ce_coef", 0.0, "Weight of the cross-entropy on the true completions.", ge=0)
    rl_coef: float = setting("ebft.rl_coef", 1.0, "Weight of the policy-gradient term.", ge=0)
    adaptive_max_tokens: bool = setting(
        "ebft.adaptive_max_tokens", True, "Bound completions by the length of the true ones (structured mode)."
    )
    gt_length_multiplier: float = setting(
        "ebft.gt_length_multiplier", 1.5, "That bound, as a multiple of the true completion's tokens.", ge=0.1
    )
    mode: Literal["structured", "strided"] = setting(
        "ebft.mode", "structured", "Complete prompts (structured), or short blocks all along a document (strided)."
    )
    stride: int = setting("ebft.stride", 8, "Tokens between the starts of two blocks (strided mode).", ge=1)
    context_length: int = setting(
        "ebft.context_length", 8, "Document tokens before the first block (strided mode).", ge=1
    )
    generate_max_len: int = setting("ebft.generate_max_len", 8, "Tokens sampled in each block (strided mode).", ge=1)
    n_samples_per_prompt: int = setting(
        "ebft.n_samples_per_prompt", 4, "Samples of each block of a document (strided mode).", ge=1
    )
    temperature: float = setting("ebft.temperature", 0.6, "Sampling temperature of strided mode.", ge=0)
    top_p: float = setting("ebft.top_p", 1.0, "Probability mass that strided mode samples from.", ge=0, le=1)
    min_completion_prefix: int = setting(
        "ebft.min_completion_prefix", 0, "Completion tokens before the first block (strided mode).", ge=0
    )
    advantage_estimator: Literal["rloo", "group_norm", "reinforce"] = setting(
        "ebft.advantage_estimator",
        "rloo",
        "Baseline of strided mode: mean of the other samples, group mean and deviation (also spelled grpo), or none.",
    )

    @field_validator("advantage_estimator", mode="before")
    @classmethod
    def _grpo_is_group_norm(cls, value: Any) -> Any:
        return "group_norm" if value == "grpo" else value

    @property
    def needs_reference(self) -> bool:
        return self.mode == "structured" and self.policy.needs_reference

    @property
    def group_size(self) -> int:
        return self.n_samples_per_prompt if self.mode == "strided" else self.policy.num_generations

    @property
    def needs_preparation(self) -> bool:
        return self.mode == "structured" and self.policy.needs_preparation

    @property
    def statistics(self) -> frozenset[str]:
        return self.policy.statistics

    def count(self, batch: Batch) -> dict[str, Tensor]:
        sampled_T = is_sampled(batch)[batch.sequence_T]
        counts = {"tokens": sampled_T.sum().float()} if self.mode == "strided" else self.policy.count(batch)
        return counts | {"ce_tokens": (~sampled_T).sum().float()} if self.ce_coef else counts

    def contributes(self, sample: Sample) -> bool:
        return self.policy.contributes(sample)

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        return self.policy.collect(out, batch) if self.needs_preparation else {}

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.policy.prepare(collected) if self.needs_preparation else {}

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T, sampled_T = given(out.logps_T), is_sampled(batch)[batch.sequence_T]
        learned = self._reinforce(out, batch) if self.mode == "strided" else self.policy.loss(out, batch, prepared)
        sums = {unit: self.rl_coef * total for unit, total in learned.sums.items()}
        if not self.ce_coef:
            return Loss(sums, learned.metrics)
        sums["ce_tokens"] = -self.ce_coef * torch.where(sampled_T, 0.0, logps_T).sum()
        return Loss(sums, learned.metrics | {"ebft/ce_loss": Mean.over(-logps_T, ~sampled_T)})

    def _reinforce(self, out: Outputs, batch: Batch) -> Loss:
        """The plain policy gradient of strided mode, whose samples are always the current policy's."""
        sampled_S, logps_T = is_sampled(batch), given(out.logps_T)
        sampled_T = sampled_S[batch.sequence_T]
        loss_T = -logps_T * torch.where(sampled_S, given(batch.advantage_S), 0.0)[batch.sequence_T]
        metrics = {
            "entropy": Mean.over(given(out.entropy_T), sampled_T),
            "ebft/rl_loss": Mean.over(loss_T, sampled_T),
        }
        return Loss({"tokens": loss_T.sum()}, metrics)

    def advantages(self, rewards_SR: Tensor, group_S: Tensor) -> Tensor:
        if self.mode == "structured":
            return self.policy.advantages(rewards_SR, group_S, "sum_then_normalize")
        reward_S = weighted_reward(rewards_SR, self.policy.reward_weights)
        if self.advantage_estimator == "rloo":
            return leave_one_out(reward_S, group_S)
        if self.advantage_estimator == "group_norm":
            return normalised(reward_S, group_S, "group")
        return reward_S.nan_to_num(0.0)


def ebft_reward(
    feature_SF: Tensor, target_SF: Tensor, group_S: Tensor, alignment_coef: float, diversity_coef: float
) -> Tensor:
    """Reward of each sample from its features, those of its true completion, and those of its group."""
    alignment_S = feature_alignment(feature_SF, target_SF)
    return 2 * alignment_coef * alignment_S - 2 * diversity_coef * feature_crowding(feature_SF, group_S)


def feature_alignment(feature_SF: Tensor, target_SF: Tensor) -> Tensor:
    """Cosine between each sample's features and those of its true completion."""
    return F.cosine_similarity(feature_SF, target_SF, dim=1)


def feature_crowding(feature_SF: Tensor, group_S: Tensor) -> Tensor:
    """Mean inner product of each sample's features with those of the other samples of its group; 0 for a lone one."""
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    total_GF = feature_SF.new_zeros(groups, feature_SF.shape[1]).index_add(0, group_S, feature_SF)
    others_S = torch.bincount(group_S, minlength=groups)[group_S] - 1
    product_S = (feature_SF * (total_GF[group_S] - feature_SF)).sum(1)
    return product_S / others_S.clamp(min=1)
