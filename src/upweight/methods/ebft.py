"""EBFT: Energy-Based Fine-Tuning (arXiv:2603.12248): sampled text is rewarded for the features of true text."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from upweight.lazy_imports import Tensor, torch
from upweight.methods.base import Method, required
from upweight.methods.formulas.advantages import leave_one_out, normalised, weighted_reward
from upweight.methods.formulas.features import Pooling, alignment, crowding, distance, leave_one_out_crowding, whitened
from upweight.methods.policy_gradient import PolicyGradient, is_sampled
from upweight.settings import setting
from upweight.types import Batch, Loss, Mean, Outputs, Sample


class EBFT(PolicyGradient, Method):
    """Feature matching by policy gradient, with an optional likelihood term on the demonstrations."""

    name: ClassVar[str] = "ebft"
    computed_rewards: ClassVar[tuple[str, ...]] = ("alignment", "diversity")
    lora_learning_rate: ClassVar[float | None] = None

    feature_layers: tuple[Annotated[float, Field(ge=0, le=1)], ...] = setting(
        "ebft.feature_layers",
        (0.25, 0.5, 0.75),
        "Layers whose hidden states make the features, as shares of the model's depth.",
        min_length=1,
    )
    embed_method: Pooling = setting("ebft.embed_method", "last_token", "How hidden states become one feature vector.")
    use_whitening: bool = setting("ebft.use_whitening", False, "Whiten features so that no direction dominates.")
    alignment_coef: float = setting("ebft.alignment_coef", 1.0, "Weight of the similarity to the true features.", ge=0)
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
        "ebft.context_length", 8, "Tokens before the first block (strided mode); blocks see all before them.", ge=1
    )
    generate_max_len: int = setting("ebft.generate_max_len", 8, "Tokens sampled in each block (strided mode).", ge=1)
    n_samples_per_prompt: int = setting("ebft.n_samples_per_prompt", 4, "Samples of each block (strided mode).", ge=1)
    temperature: float = setting("ebft.temperature", 0.6, "Sampling temperature of strided mode.", ge=0)
    top_p: float = setting("ebft.top_p", 1.0, "Probability mass that strided mode samples from.", ge=0, le=1)
    min_completion_prefix: int = setting(
        "ebft.min_completion_prefix", 0, "Completion tokens before the first block (strided mode).", ge=0
    )
    baseline: Literal["rloo", "group_norm", "reinforce"] | None = setting(
        "ebft.advantage_estimator", None, "Baseline. When left out: rloo, or group_norm if `trl.scale_rewards` is set."
    )

    @field_validator("baseline", mode="before")
    @classmethod
    def _grpo_is_group_norm(cls, value: Any) -> Any:
        return "group_norm" if value == "grpo" else value

    @model_validator(mode="after")
    def _samples_can_differ(self) -> "EBFT":
        if self.advantage_function is not None:
            raise ValueError(
                "trl.advantage_estimator: features are rewards of EBFT's own; choose ebft.advantage_estimator"
            )
        if self.strided and self.n_samples_per_prompt > 1 and 0 in (self.temperature, self.top_p):
            key = "temperature" if self.temperature == 0 else "top_p"
            raise ValueError(f"ebft.{key}: at 0 all samples of a block are alike, and nothing is learned from them")
        return self

    @classmethod
    def formats(cls) -> str:
        return "ebft"

    @property
    def strided(self) -> bool:
        return self.mode == "strided"

    @property
    def needs_reference(self) -> bool:
        return not self.strided and super().needs_reference

    @property
    def group_size(self) -> int:
        return self.n_samples_per_prompt if self.strided else super().group_size

    @property
    def needs_preparation(self) -> bool:
        return not self.strided and super().needs_preparation

    def count(self, batch: Batch) -> dict[str, Tensor]:
        sampled_T = is_sampled(batch)[batch.sequence_T]
        counts = {"tokens": sampled_T.sum().float()} if self.strided else super().count(batch)
        return counts | {"ce_tokens": (~sampled_T).sum().float()} if self.ce_coef else counts

    def contributes(self, sample: Sample) -> bool:
        if sample.label == 1:
            return self.ce_coef > 0
        rewarded = bool(sample.advantage) and bool(sample.loss_mask.any())
        return self.rl_coef > 0 and (rewarded if self.strided else super().contributes(sample))

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        logps_T, sampled_T = required(out.logps_T), is_sampled(batch)[batch.sequence_T]
        policy = self._reinforce_loss(out, batch) if self.strided else super().loss(out, batch, prepared)
        sums = {name: self.rl_coef * total for name, total in policy.sums.items()}
        if not self.ce_coef:
            return Loss(sums, policy.metrics)
        sums["ce_tokens"] = -self.ce_coef * torch.where(sampled_T, 0.0, logps_T).sum()
        return Loss(sums, {**policy.metrics, "ebft/ce_loss": Mean.over(-logps_T, ~sampled_T)})

    def _reinforce_loss(self, out: Outputs, batch: Batch) -> Loss:
        """Return the plain policy gradient of strided mode, whose samples are always on-policy."""
        sampled_S, logps_T = is_sampled(batch), required(out.logps_T)
        sampled_T = sampled_S[batch.sequence_T]
        loss_T = -logps_T * torch.where(sampled_S, required(batch.advantage_S), 0.0)[batch.sequence_T]
        entropy = Mean.over(required(out.entropy_T), sampled_T)
        return Loss({"tokens": loss_T.sum()}, {"entropy": entropy, "ebft/rl_loss": Mean.over(loss_T, sampled_T)})

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        reward_S = weighted_reward(rewards_SR, None)
        if self.baseline == "group_norm":
            return normalised(reward_S, group_S, self.reward_scale)
        if self.baseline == "reinforce":
            return reward_S.nan_to_num(0.0)
        return leave_one_out(rewards_SR[:, 0], group_S) + leave_one_out_crowding(rewards_SR[:, 1], group_S)

    def feature_rewards(self, feature_SF: Tensor, target_GF: Tensor, size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return alignment and diversity rewards of groups of `size` samples, and their metrics."""
        metrics = {"ebft/cfm_loss": distance(feature_SF, target_GF, size)}
        if self.use_whitening:
            feature_SF, target_GF = whitened(feature_SF, target_GF, size)
        alignment_S, crowding_S = alignment(feature_SF, target_GF, size), crowding(feature_SF, size)
        metrics |= {"ebft/alignment": alignment_S, "ebft/diversity": crowding_S}
        rewards = [2 * self.alignment_coef * alignment_S, -2 * self.diversity_coef * crowding_S]
        return torch.stack(rewards, 1), metrics
