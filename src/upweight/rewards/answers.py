"""The names that `rewards.workers` imports."""

from upweight.rewards.outcomes import Function, RewardFailure, RewardOutcome, failed, invoke

__all__ = ["Function", "RewardFailure", "RewardOutcome", "failed", "invoke"]
