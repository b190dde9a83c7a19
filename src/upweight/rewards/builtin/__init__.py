"""Rewards ready to name in YAML, light to import, since reward workers start with it."""

from upweight.rewards.builtin.adaptive import AdaptiveReward, DebugReward
from upweight.rewards.builtin.code import CodeReward
from upweight.rewards.builtin.correctness import ExactReward, MathReward, NumericReward
from upweight.rewards.builtin.formats import (
    FormatReward,
    IncrementalFormatReward,
    JsonReward,
    RegexReward,
    XmlTagsReward,
)
from upweight.rewards.builtin.judge import JudgeReward
from upweight.rewards.builtin.lengths import CosineLengthReward, LengthReward
from upweight.rewards.builtin.penalties import DiversityReward, RepetitionReward
from upweight.rewards.builtin.spec import BUILTINS, builtin_reward, options_of
from upweight.rewards.builtin.text import texts_of

BUILTINS |= {
    "exact": ExactReward,
    "numeric": NumericReward,
    "math": MathReward,
    "format": FormatReward,
    "incremental_format": IncrementalFormatReward,
    "xml_tags": XmlTagsReward,
    "regex": RegexReward,
    "json": JsonReward,
    "length": LengthReward,
    "cosine_length": CosineLengthReward,
    "repetition": RepetitionReward,
    "diversity": DiversityReward,
    "code": CodeReward,
    "judge": JudgeReward,
    "adaptive": AdaptiveReward,
    "debug": DebugReward,
}

__all__ = ["BUILTINS", "builtin_reward", "options_of", "texts_of"]
