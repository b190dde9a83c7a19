"""Rewards ready to name in YAML. Light to import: reward workers start with it."""

from upweight.rewards.builtin.spec import BUILTINS, builtin_reward, options_of
from upweight.rewards.builtin.text import texts_of

__all__ = ["BUILTINS", "builtin_reward", "options_of", "texts_of"]
