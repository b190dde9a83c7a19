"""GDPO: Group reward-Decoupled normalisation Policy Optimization, a policy gradient for several rewards."""

from typing import ClassVar, Literal

from pydantic import model_validator

from upweight.lazy_imports import Tensor
from upweight.methods.base import Method
from upweight.methods.formulas.advantages import decoupled
from upweight.methods.policy_gradient import PolicyGradient, RewardToGo
from upweight.settings import setting


class GDPO(RewardToGo, PolicyGradient, Method):
    """GRPO whose rewards are normalised separately before they are summed."""

    name: ClassVar[str] = "gdpo"

    aggregation: Literal["normalize_then_sum"] = setting(
        "trl.multi_objective_aggregation", "normalize_then_sum", "Rewards are normalised one by one, then summed up."
    )

    @model_validator(mode="after")
    def _policy_fits_aggregation(self) -> "GDPO":
        self.refuse_for_decoupled_rewards("use rl: grpo")
        return self

    @property
    def scales_each_reward(self) -> bool:
        return True

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        return decoupled(rewards_SR, group_S, self.reward_weights)
