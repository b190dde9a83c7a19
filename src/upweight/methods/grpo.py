"""GRPO: Group Relative Policy Optimization (arXiv:2402.03300) and the losses derived from it."""

from typing import ClassVar, Literal

from pydantic import model_validator

from upweight.lazy_imports import Tensor
from upweight.methods.base import Method
from upweight.methods.formulas.advantages import decoupled, leave_one_out, normalised, weighted_reward
from upweight.methods.policy_gradient import PolicyGradient, RewardToGo
from upweight.settings import setting


class GRPO(RewardToGo, PolicyGradient, Method):
    """A policy gradient whose baseline is the other completions of the same prompt."""

    name: ClassVar[str] = "grpo"

    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = setting(
        "trl.multi_objective_aggregation", "sum_then_normalize", "Sum rewards, then normalise; or the reverse (GDPO)."
    )

    @model_validator(mode="after")
    def _policy_fits_aggregation(self) -> "GRPO":
        if self.scales_each_reward:
            self.refuse_for_decoupled_rewards("set trl.multi_objective_aggregation: sum_then_normalize")
        call = self.advantage_function
        if self.reward_to_go and call is not None and "rewards_to_go" not in call.asks:
            raise ValueError(
                f"trl.reward_to_go: no effect, since '{call.function.name}' does not ask for 'rewards_to_go'"
            )
        return self

    @property
    def scales_each_reward(self) -> bool:
        return self.aggregation == "normalize_then_sum"

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        if self.scales_each_reward:
            return decoupled(rewards_SR, group_S, self.reward_weights)
        reward_S = weighted_reward(rewards_SR, self.reward_weights)
        if self.advantage_estimator == "rloo":
            return leave_one_out(reward_S, group_S)
        return normalised(reward_S, group_S, self.reward_scale)
