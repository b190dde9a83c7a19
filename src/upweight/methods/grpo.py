"""GRPO: Group Relative Policy Optimization (arXiv:2402.03300) and the losses derived from it."""

from typing import ClassVar

from pydantic import model_validator
from torch import Tensor

from upweight.methods.base import Method, ReferenceSync
from upweight.methods.policy_gradient import Aggregation, PolicyGradient
from upweight.settings import inline, setting
from upweight.types import Batch, Loss, Outputs, Sample


class Grouped:
    """The common base of GRPO and GDPO, which delegates everything but the advantages to the policy gradient."""

    data: ClassVar = "prompts"
    online: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 1e-6
    lora_learning_rate: ClassVar[float | None] = 1e-5

    policy: PolicyGradient

    @property
    def policy_settings(self) -> PolicyGradient | None:
        return self.policy

    @property
    def reference_sync(self) -> ReferenceSync | None:
        return self.policy.reference_sync

    @property
    def needs_reference(self) -> bool:
        return self.policy.needs_reference

    @property
    def group_size(self) -> int:
        return self.policy.num_generations

    @property
    def needs_preparation(self) -> bool:
        return self.policy.needs_preparation

    @property
    def statistics(self) -> frozenset[str]:
        return self.policy.statistics

    def count(self, batch: Batch) -> dict[str, Tensor]:
        return self.policy.count(batch)

    def contributes(self, sample: Sample) -> bool:
        return self.policy.contributes(sample)

    def collect(self, out: Outputs, batch: Batch) -> dict[str, Tensor]:
        return self.policy.collect(out, batch)

    def prepare(self, collected: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.policy.prepare(collected)

    def loss(self, out: Outputs, batch: Batch, prepared: dict[str, Tensor]) -> Loss:
        return self.policy.loss(out, batch, prepared)


class GRPO(Grouped, Method):
    """A policy gradient whose baseline is the other completions of the same prompt."""

    name: ClassVar[str] = "grpo"

    policy: PolicyGradient = inline(PolicyGradient)
    aggregation: Aggregation = setting(
        "trl.multi_objective_aggregation",
        "sum_then_normalize",
        "Normalise the weighted sum of the rewards, or sum up rewards that were normalised one by one (GDPO).",
    )

    @model_validator(mode="after")
    def _policy_fits_aggregation(self) -> "GRPO":
        if self.aggregation == "normalize_then_sum":
            self.policy.refuse_for_decoupled_rewards("set trl.multi_objective_aggregation: sum_then_normalize")
        return self

    @property
    def scales_each_reward(self) -> bool:
        return self.aggregation == "normalize_then_sum"

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        return self.policy.advantages(rewards_SR, group_S, self.aggregation)
