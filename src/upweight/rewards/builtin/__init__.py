"""Rewards ready to name in YAML, light to import, since reward workers start with it."""

from upweight.rewards.builtin import adaptive, code, correctness, formats, judge, measures  # noqa: F401
from upweight.rewards.builtin.spec import BUILTINS, builtin_reward, options_of

__all__ = ["BUILTINS", "builtin_reward", "options_of"]
