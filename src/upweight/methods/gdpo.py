"""GDPO: Group reward-Decoupled normalisation Policy Optimization, a policy gradient for several rewards."""

from typing import ClassVar, Literal

from pydantic import model_validator
from torch import Tensor

from upweight.methods.base import Method
from upweight.methods.grpo import Grouped
from upweight.methods.policy_gradient import PolicyGradient
from upweight.settings import inline, setting


class GDPO(Grouped, Method):
    """GRPO whose rewards are normalised separately before they are summed."""

    name: ClassVar[str] = "gdpo"

    policy: PolicyGradient = inline(PolicyGradient)
    aggregation: Literal["normalize_then_sum"] = setting(
        "trl.multi_objective_aggregation",
        "normalize_then_sum",
        "How rewards become one advantage; rl: gdpo means normalize_then_sum.",
    )

    @model_validator(mode="after")
    def _policy_fits_aggregation(self) -> "GDPO":
        self.policy.refuse_for_decoupled_rewards("use rl: grpo")
        return self

    @property
    def scales_each_reward(self) -> bool:
        return True

    def advantages(self, rewards_SR: Tensor, group_S: Tensor, log_ratio_S: Tensor | None = None) -> Tensor:
        return self.policy.advantages(rewards_SR, group_S, self.aggregation)
