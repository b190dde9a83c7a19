"""Rewards that compare a completion with the answer of its row, and the numbers in both."""

import math
import re
import threading
import unicodedata
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from pydantic import NonNegativeFloat

from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rewards.builtin.spec import builtin
from upweight.rewards.builtin.text import Extract, ScoreList, column_of, marked_answer, normalised, texts_of

# A last number is looked for at the end only: the work stays small for a completion of any length.
_TAIL = 100_000
_VULGAR = re.compile("([\u00bc-\u00be\u2150-\u215e])")
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w.)\]])[-+])?
    (?:[$€£¥]\s?)?(?P<inner>(?<=[$€£¥])[-+])?
    (?:(?P<whole>\d+)\s(?=\d+/\d))?
    (?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)
    (?P<power>[eE][-+]?\d+)?
    (?:\s?/\s?(?P<below>\d+(?:\.\d+)?))?
    \s?(?P<percent>%)?
    """,
    re.VERBOSE,
)

# Numbers that can only have a decimal comma, as German or French ones: 7,5 and 1.250,50, and not 1,250.
_DECIMAL_COMMA = re.compile(r"(?<![\d.,])(?:\d{1,3}(?:\.\d{3})+,\d+|0,\d+|\d{4,},\d+|\d+,(?!\d{3}(?!\d))\d+)(?!\d|,\d)")


@dataclass(frozen=True)
class ByAnswer(ABC):
    """Scores each completion with `_score` against the answer of its row; None without an answer."""

    column: str = "answer"
    extract: Extract = "auto"
    tag: str | None = None
    score: float = 1.0
    wrong: float = 0.0
    __name__ = ""

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        answers = column_of(columns, self.column, self.__name__, len(completions))
        pairs = zip(texts_of(completions), answers, strict=True)
        return [None if answer is None else self._score(text, str(answer)) for text, answer in pairs]

    @abstractmethod
    def _score(self, text: str, answer: str) -> float | None:
        """Return the score of a completion's text against the answer; None where the answer cannot be read."""


def _extract_answer(text: str, extract: Extract, tag: str | None) -> str | None:
    """Return the marked answer; the whole text if there is no mark and the options require none."""
    marked = marked_answer(text, extract, tag)
    return text if marked is None and extract == "auto" and tag is None else marked


@builtin
class ExactReward(ByAnswer):
    """Scores a completion whose answer equals the row's, without case, spacing and outer punctuation."""

    __name__ = "exact"

    def _score(self, text: str, answer: str) -> float:
        given = _extract_answer(text, self.extract, self.tag)
        expected = marked_answer(answer, "auto", None) or answer
        return self.score if given is not None and normalised(given) == normalised(expected) else self.wrong


@builtin
class NumericReward(ByAnswer):
    """Scores a completion whose marked or last number equals the row's within a tolerance."""

    tolerance: NonNegativeFloat = 1e-6
    relative: NonNegativeFloat = 0.0
    __name__ = "numeric"

    def _score(self, text: str, answer: str) -> float | None:
        wanted = marked_answer(answer, "auto", None) or answer
        has_comma = _DECIMAL_COMMA.fullmatch(wanted.strip(" +-$€£¥%")) is not None
        read = _with_points if has_comma else str
        expected = last_number(read(wanted))
        if expected is None:
            warn_once(f"reward 'numeric': no number in the answer {answer[:80]!r}; such rows do not count.")
            return None
        marked = _extract_answer(text, self.extract, self.tag)
        given = None if marked is None else last_number(read(marked))
        right = given is not None and same_number(given, expected, self.tolerance, self.relative)
        return self.score if right else self.wrong


@builtin
class MathReward(ByAnswer):
    """Scores a completion whose final expression equals the row's by algebra (math-verify)."""

    extract: Extract = "last"
    __name__ = "math"

    def __post_init__(self) -> None:
        if find_spec("math_verify") is None:
            remedy = "Run: pip install math-verify. For plain numbers, 'numeric' needs nothing."
            raise UserError(f"Reward 'math' needs math-verify, which is not installed. {remedy}")

    def _score(self, text: str, answer: str) -> float | None:
        expected = _parse_expression(marked_answer(answer, "hash", None) or answer)
        if not expected:
            warn_once(f"reward 'math': cannot read the answer {answer[:80]!r}; such rows do not count.")
            return None
        marked = marked_answer(text, self.extract, self.tag)
        whole = self.extract == "last" and self.tag is None
        given = [] if marked is None else _parse_expression(marked[-20_000:], whole)
        right = given and math_verify().verify(expected, given, timeout_seconds=alarm_limit(5))
        return self.score if right else self.wrong


def math_verify() -> Any:
    """Import the optional package when it is first needed."""
    return import_module("math_verify")


def _parse_expression(text: str, whole: bool = False) -> list[Any]:
    """Text -> the expression math-verify finds; bare LaTeX is put in dollar signs first, as it expects."""
    if not whole and "\\" in text and "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    return math_verify().parse(text, parsing_timeout=alarm_limit(5))


def alarm_limit(seconds: int) -> int | None:
    """The time limit math-verify may set: it is a signal, which only a main thread can receive."""
    return seconds if threading.current_thread() is threading.main_thread() else None


class Number(NamedTuple):
    value: float
    percent: bool


def _plain_numbers(text: str) -> str:
    text = unicodedata.normalize("NFKC", _VULGAR.sub(r" \1", text[-_TAIL:]))
    text = text.replace("\u2212", "-").replace("\u2044", "/").replace("\\$", "$").replace("\\%", "%")
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return _FRAC.sub(_slashed_fraction, text) if "\\" in text else text


def _slashed_fraction(frac: re.Match[str]) -> str:
    mixed = frac.start() and frac.string[frac.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{frac[1].strip()}/{frac[2].strip()}"


def _with_points(text: str) -> str:
    """Write numbers that have a decimal comma with a point."""
    return _DECIMAL_COMMA.sub(lambda number: number[0].replace(".", "").replace(",", "."), text[-_TAIL:])


def last_number(text: str) -> Number | None:
    """Text -> its last number, or None when there is none or it is not finite."""
    matches = deque(_NUMBER.finditer(_plain_numbers(text)), maxlen=1)
    if not matches:
        return None
    match = matches[0]
    value = float(match["digits"].replace(",", "") + (match["power"] or ""))
    if match["below"]:
        below = float(match["below"])
        value = value / below if below else math.nan
    value += float(match["whole"] or 0)
    if "-" in (match["sign"] or "") or match["inner"] == "-":
        value = -value
    return Number(value, match["percent"] is not None) if math.isfinite(value) else None


def same_number(given: Number, wanted: Number, tolerance: float, relative: float) -> bool:
    """Whether two numbers agree; a percentage agrees with its figure and with its hundredth."""
    readings = [given.value]
    if given.percent != wanted.percent:
        readings.append(given.value / 100 if given.percent else given.value * 100)
    # 1e-12 forgives the rounding of the division in a fraction, nothing a person would see.
    allowed = max(tolerance, max(relative, 1e-12) * abs(wanted.value))
    return any(abs(reading - wanted.value) <= allowed for reading in readings)
