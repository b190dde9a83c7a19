"""Formats by name for each kind of data; a format makes examples of a row."""

from upweight.data.examples import Format
from upweight.data.formats import ebft, kto, nemo_gym, pairs, prompts, sft, stepwise
from upweight.methods.base import Method

FORMATS: dict[str, dict[str, Format]] = {
    "pairs": pairs.FORMATS,
    "labelled": kto.FORMATS,
    "steps": stepwise.FORMATS,
    "text": sft.FORMATS,
    "prompts": prompts.FORMATS | nemo_gym.FORMATS,
    "ebft": ebft.FORMATS,
}

# Rows without a `type`, and what a user's transform returns.
UNTYPED: dict[str, Format] = {
    "pairs": pairs.untyped,
    "labelled": kto.untyped,
    "steps": stepwise.stepwise,
    "text": sft.untyped,
    "prompts": prompts.untyped,
    "ebft": ebft.untyped,
}

# A `type` written as a mapping of columns.
USER_DEFINED: dict[str, Format] = {
    "pairs": pairs.user_defined,
    "labelled": kto.user_defined,
    "text": sft.user_defined,
    "prompts": prompts.user_defined,
}


def kind_of(method: Method) -> str:
    """The kind of data whose formats serve a method."""
    return "ebft" if method.name == "ebft" else method.data
