"""What a good answer is. Each function gets lists with one entry for each completion and returns as many numbers.

Try them without training: upweight rewards config.yaml
"""

import re
from typing import Any


def correct(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1 where the answer of the row stands in the completion; `answer` is a column of the prompts."""
    pairs = zip(completions, answer, strict=True)
    return [float(re.search(rf"\b{re.escape(right)}\b", text(one)) is not None) for one, right in pairs]


def sentence(completions: list[Any], **kwargs: Any) -> list[float]:
    """Half for a capital letter at the start, half for one full stop, at the end: partial credit helps learning."""
    texts = [text(completion).strip() for completion in completions]
    return [0.5 * one[:1].isupper() + 0.5 * (one.endswith(".") and one.count(".") == 1) for one in texts]


def text(completion: Any) -> str:
    """Where prompts are messages a completion is a list of messages, too; where they are texts it is text."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
