"""Dataset formats by name for each kind of data; a format builds examples from a row."""

from upweight.config.sections.data import UserFormat
from upweight.data.examples import Format
from upweight.data.formats import distill, ebft, kto, nemo_gym, pairs, prompts, sft, stepwise

FORMATS: dict[str, dict[str, Format]] = {
    "pairs": pairs.FORMATS,
    "labelled": kto.FORMATS,
    "steps": stepwise.FORMATS,
    "text": sft.FORMATS,
    "prompts": prompts.FORMATS | nemo_gym.FORMATS,
    "ebft": ebft.FORMATS,
    "distill": distill.FORMATS,
}


def format_of(kind: str, name: str | UserFormat | None) -> Format:
    """Return the format that `type` names; None is for rows without one and for those that a transform returns."""
    if name is None:
        return FORMATS[kind].get("passthrough", stepwise.stepwise)
    return FORMATS[kind]["user_defined" if isinstance(name, UserFormat) else name]
