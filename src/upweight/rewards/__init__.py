"""Rewards: user functions, built-ins and reward models; none of them can hang or crash a run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.rewards.trl_rewards import (
        accuracy_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )

__all__ = [
    "accuracy_reward", "get_cosine_scaled_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment",
    "reasoning_accuracy_reward", "think_format_reward",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the script rewards lazily, because reward workers import this package."""
    if name not in __all__:
        raise AttributeError(f"module 'upweight.rewards' has no attribute {name!r}")
    from upweight.rewards import trl_rewards

    return getattr(trl_rewards, name)
