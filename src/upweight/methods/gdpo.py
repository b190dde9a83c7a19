"""GDPO: Group reward-Decoupled normalisation Policy Optimization, a policy gradient for several rewards."""

from typing import ClassVar, Literal

from pydantic import model_validator
from torch import Tensor

from upweight.methods.base import Method
from upweight.methods.policy_gradient import PolicyGradient
from upweight.settings import inline, setting
from upweight.types import Batch, Loss, Outputs, Sample


class GDPO(Method):
    """GRPO whose rewards are normalised one by one before they are summed."""

    name: ClassVar[str] = "gdpo"
    data: ClassVar = "prompts"
    online: ClassVar[bool] = True
    learning_rate: ClassVar[float] = 1e-6
    lora_learning_rate: ClassVar[float | None] = 1e-5

    policy: PolicyGradient = inline(PolicyGradient)
    aggregation: Literal["normalize_then_sum"] = setting(
        "trl.multi_objective_aggregation",
        "normalize_then_sum",
        "How rewards become one advantage; rl: gdpo means normalize_then_sum.",
    )

    @model_validator(mode="after")
    def _baseline_fits_aggregation(self) -> "GDPO":
        if self.policy.advantage_estimator == "rloo":
            raise ValueError("trl.advantage_estimator: rloo does not go with rl: gdpo; use rl: grpo")
        return self

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

    def advantages(self, rewards_SR: Tensor, group_S: Tensor) -> Tensor:
        return self.policy.advantages(rewards_SR, group_S, self.aggregation)
