"""Rewards that compare a completion with the answer of its row."""

import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pydantic import NonNegativeFloat

from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rewards.builtin.numbers import last_number, same_number
from upweight.rewards.builtin.spec import builtin
from upweight.rewards.builtin.text import Extract, ScoreList, column_of, marked_answer, normalised, texts_of


def _scores(self: Any, completions: list[Any], **columns: Any) -> ScoreList:
    """Score each completion against the answer of its row with the reward's `_score`; None without an answer."""
    answers = column_of(columns, self.column, self.__name__, len(completions))
    pairs = zip(texts_of(completions), answers, strict=True)
    return [None if answer is None else self._score(text, str(answer)) for text, answer in pairs]


def _extracted(text: str, extract: Extract, tag: str | None) -> str | None:
    """Return the marked answer; the whole text if there is no mark and the options require none."""
    marked = marked_answer(text, extract, tag)
    return text if marked is None and extract == "auto" and tag is None else marked


@builtin
class ExactReward:
    """Scores a completion whose answer equals the row's, without case, spacing and outer punctuation."""

    column: str = "answer"
    extract: Extract = "auto"
    tag: str | None = None
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "exact"

    __call__ = _scores

    def _score(self, text: str, answer: str) -> float:
        given = _extracted(text, self.extract, self.tag)
        expected = marked_answer(answer, "auto", None) or answer
        return self.score if given is not None and normalised(given) == normalised(expected) else self.wrong


@builtin
class NumericReward:
    """Scores a completion whose marked or last number equals the row's within a tolerance."""

    column: str = "answer"
    extract: Extract = "auto"
    tag: str | None = None
    tolerance: NonNegativeFloat = 1e-6
    relative: NonNegativeFloat = 0.0
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "numeric"

    __call__ = _scores

    def _score(self, text: str, answer: str) -> float | None:
        expected = last_number(marked_answer(answer, "auto", None) or answer)
        if expected is None:
            warn_once(f"reward 'numeric': no number in the answer {answer[:80]!r}; such rows do not count.")
            return None
        marked = _extracted(text, self.extract, self.tag)
        given = None if marked is None else last_number(marked)
        right = given is not None and same_number(given, expected, self.tolerance, self.relative)
        return self.score if right else self.wrong


@builtin
class MathReward:
    """Scores a completion whose final expression equals the row's by algebra (math-verify)."""

    column: str = "answer"
    extract: Extract = "last"
    tag: str | None = None
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "math"

    def __post_init__(self) -> None:
        if find_spec("math_verify") is None:
            raise UserError(
                "Reward 'math' needs math-verify, which is not installed. Run: pip install 'upweight[math]'. "
                "For plain numbers, 'numeric' needs nothing."
            )

    __call__ = _scores

    def _score(self, text: str, answer: str) -> float | None:
        expected = _expression(marked_answer(answer, "hash", None) or answer)
        if not expected:
            warn_once(f"reward 'math': cannot read the answer {answer[:80]!r}; such rows do not count.")
            return None
        marked = marked_answer(text, self.extract, self.tag)
        whole = self.extract == "last" and self.tag is None
        given = [] if marked is None else _expression(marked[-20_000:], whole)
        right = given and math_verify().verify(expected, given, timeout_seconds=alarm_limit(5))
        return self.score if right else self.wrong


def math_verify() -> Any:
    """Import the optional package when it is first needed."""
    return import_module("math_verify")


def _expression(text: str, whole: bool = False) -> list[Any]:
    """Text -> the expression math-verify finds; bare LaTeX is put in dollar signs first, as it expects."""
    if not whole and "\\" in text and "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    return math_verify().parse(text, parsing_timeout=alarm_limit(5))


def alarm_limit(seconds: int) -> int | None:
    """The time limit math-verify may set: it is a signal, which only a main thread can receive."""
    return seconds if threading.current_thread() is threading.main_thread() else None
