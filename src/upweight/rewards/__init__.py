"""Rewards: user functions, built-ins and reward models, run so that none of them can hang or break a run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upweight.rewards.call import RewardCall
    from upweight.rewards.load import as_rewards, load_rewards
    from upweight.rewards.reward import Reward, check_columns
    from upweight.rewards.scorer import Scorer, Scores

__all__ = ["Reward", "RewardCall", "Scorer", "Scores", "as_rewards", "check_columns", "load_rewards"]
_MODULES = {
    "Reward": "reward",
    "RewardCall": "call",
    "Scorer": "scorer",
    "Scores": "scorer",
    "as_rewards": "load",
    "check_columns": "reward",
    "load_rewards": "load",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: worker processes import this package, and stay light."""
    if name not in _MODULES:
        raise AttributeError(f"module 'upweight.rewards' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"upweight.rewards.{_MODULES[name]}"), name)
