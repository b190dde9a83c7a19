"""Dataset formats by name for each kind of data; a format builds examples from a row."""

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

# For rows without a `type`, and for the rows that a user's transform returns.
UNTYPED: dict[str, Format] = {
    "pairs": pairs.untyped,
    "labelled": kto.untyped,
    "steps": stepwise.stepwise,
    "text": sft.untyped,
    "prompts": prompts.untyped,
    "ebft": ebft.untyped,
}

# For a `type` that is a mapping of columns.
USER_DEFINED: dict[str, Format] = {
    "pairs": pairs.user_defined,
    "labelled": kto.user_defined,
    "text": sft.user_defined,
    "prompts": prompts.user_defined,
}


def kind_of(method: Method) -> str:
    """Return the kind of data whose formats a method reads."""
    return "ebft" if method.name == "ebft" else method.data
