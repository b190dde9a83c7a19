"""Rewards that compare a completion with the answer of its row."""

import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rewards.builtin.numbers import last_number, same_number
from upweight.rewards.builtin.text import STRICT, Extract, ScoreList, column_of, marked_answer, normalised, texts_of


def _scores(self: Any, completions: list[Any], **columns: Any) -> ScoreList:
    """Score each completion against the answer of its row with the reward's `_score`."""
    answers = column_of(columns, self.column, self.__name__, len(completions))
    return [self._score(*pair) for pair in zip(texts_of(completions), answers, strict=True)]


def _extracted(text: str, extract: Extract, tag: str | None) -> str | None:
    """Return the marked answer; the whole text if there is no mark and the options require none."""
    marked = marked_answer(text, extract, tag)
    return text if marked is None and extract == "auto" and tag is None else marked


@dataclass(frozen=True, config=STRICT)
class ExactReward:
    """Scores a completion whose answer equals the row's, without case, spacing and outer punctuation."""

    column: str = "answer"
    extract: Extract = "auto"
    tag: str | None = None
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "exact"

    __call__ = _scores

    def _score(self, text: str, answer: Any) -> float | None:
        if answer is None:
            return None
        given = _extracted(text, self.extract, self.tag)
        expected = marked_answer(str(answer), "auto", None) or str(answer)
        return self.score if given is not None and normalised(given) == normalised(expected) else self.wrong


@dataclass(frozen=True, config=STRICT)
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

    def _score(self, text: str, answer: Any) -> float | None:
        expected = None if answer is None else last_number(marked_answer(str(answer), "auto", None) or str(answer))
        if expected is None:
            if answer is not None:
                warn_once(f"reward 'numeric': no number in the answer {str(answer)[:80]!r}; such rows do not count.")
            return None
        marked = _extracted(text, self.extract, self.tag)
        given = None if marked is None else last_number(marked)
        right = given is not None and same_number(given, expected, self.tolerance, self.relative)
        return self.score if right else self.wrong


@dataclass(frozen=True, config=STRICT)
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

    def _score(self, text: str, answer: Any) -> float | None:
        if answer is None:
            return None
        expected = _expression(marked_answer(str(answer), "hash", None) or str(answer))
        if not expected:
            warn_once(f"reward 'math': cannot read the answer {str(answer)[:80]!r}; such rows do not count.")
            return None
        marked = marked_answer(text, self.extract, self.tag)
        whole = self.extract == "last" and self.tag is None
        given = [] if marked is None else _expression(marked[-20_000:], whole)
        return self.score if given and math_verify().verify(expected, given, timeout_seconds=_alarm(5)) else self.wrong


def math_verify() -> Any:
    """Import the optional package when it is first needed."""
    return import_module("math_verify")


def _expression(text: str, whole: bool = False) -> list[Any]:
    """Text -> the expression math-verify finds; bare LaTeX is put in dollar signs first, as it expects."""
    if not whole and "\\" in text and "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    return math_verify().parse(text, parsing_timeout=_alarm(5))


def _alarm(seconds: int) -> int | None:
    """The time limit math-verify may set: it is a signal, which only a main thread can receive."""
    return seconds if threading.current_thread() is threading.main_thread() else None
