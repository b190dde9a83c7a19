"""What the demo rewards: the right answer, in one whole sentence. `length` in config.yaml is a built-in."""

import re


def correct(completions, answers, **kwargs):
    """1 where the row's answer stands in the completion as a word."""
    pairs = zip(completions, answers, strict=True)
    return [float(bool(re.search(rf"\b{re.escape(answer)}\b", text(one), re.IGNORECASE))) for one, answer in pairs]


def one_sentence(completions, **kwargs):
    """1 for a capital letter, then no line break and no stop but the one at the end."""
    return [float(bool(re.fullmatch(r"[A-Z][^.!?\n]*\.", text(one)))) for one in completions]


def text(completion):
    """The prompts are messages, so a completion is one too."""
    return completion[0]["content"]
