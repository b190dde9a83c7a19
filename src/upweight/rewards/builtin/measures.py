"""Rewards for what can be counted: the length of a completion, its repetition, its likeness to others of its group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from upweight.errors import UserError
from upweight.rewards.builtin.spec import builtin, builtin_reward
from upweight.rewards.builtin.text import ScoreList, Unit, texts_of, units_of

Penalty = Annotated[float, Field(le=0)]


@builtin
class LengthReward:
    """Scores a length from minimum to maximum, falling in a straight line to `wrong` over `slack` units outside."""

    minimum: NonNegativeInt = 0
    maximum: NonNegativeInt | None = None
    unit: Unit = "words"
    slack: NonNegativeInt = 0
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "length"

    def __post_init__(self) -> None:
        if self.maximum is not None and self.maximum < self.minimum:
            raise UserError(f"Reward 'length': maximum {self.maximum} is below minimum {self.minimum}.")
        if self.maximum is None and not self.minimum:
            raise UserError("Reward 'length': give a minimum, a maximum or both, as in length(maximum=200).")

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        return [self._score(len(units)) for units in units_of(completions, columns, self.unit, self.__name__)]

    def _score(self, length: int) -> float:
        beyond = 0 if self.maximum is None else length - self.maximum
        outside = max(self.minimum - length, beyond, 0)
        return self.score + (self.wrong - self.score) * min(outside / (self.slack + 1), 1.0) if outside else self.score


@builtin
class CosineLengthReward:
    """Scores right completions higher when short and wrong ones lower when short, along half a cosine."""

    max_length: PositiveInt = 1000
    unit: Unit = "tokens"
    by: str = "numeric"
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    too_long: float | None = None
    __name__ = "cosine_length"

    def __post_init__(self) -> None:
        if builtin_reward(self.by) is None:
            raise UserError(f"Reward 'cosine_length': by={self.by!r} names no built-in reward; try by='numeric'.")

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        judge: Any = builtin_reward(self.by)
        lengths = map(len, units_of(completions, columns, self.unit, self.__name__))
        pairs = zip(judge(completions, **columns), lengths, strict=True)
        return [None if mark is None else self.scaled(mark, length) for mark, length in pairs]

    def scaled(self, mark: float, length: int) -> float:
        """The score of a completion that was judged right (0.5 and above) or wrong, by its length."""
        if length > self.max_length and self.too_long is not None:
            return self.too_long
        right = mark >= 0.5
        short, long = (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        share = min(length / self.max_length, 1.0)
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * share))


def ngrams(units: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """Units -> their runs of `size`, in order."""
    return list(zip(*(units[shift:] for shift in range(size)), strict=False))


@dataclass(frozen=True)
class NgramOptions:
    """The options of rewards that compare n-grams, and how these read completions: without case."""

    ngram: PositiveInt
    unit: Unit = "words"
    penalty: Penalty = -1.0

    def units(self, completions: list[Any], columns: dict[str, Any], reward: str) -> list[Sequence[Any]]:
        return units_of([text.casefold() for text in texts_of(completions)], columns, self.unit, reward)


@builtin
class RepetitionReward(NgramOptions):
    """Gives the penalty times the share of n-grams that repeat earlier ones of the same completion."""

    ngram: PositiveInt = 3
    __name__ = "repetition"

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        return [self.penalised(units) for units in self.units(completions, columns, self.__name__)]

    def penalised(self, units: Sequence[Any]) -> float:
        runs = ngrams(units, self.ngram)
        return self.penalty * (1 - len(set(runs)) / len(runs)) if runs else 0.0


@builtin
class DiversityReward(NgramOptions):
    """Gives the penalty times the mean n-gram similarity to the other completions of the same prompt."""

    ngram: PositiveInt = 2
    __name__ = "diversity"

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        units = self.units(completions, columns, self.__name__)
        runs = [frozenset(ngrams(row, min(self.ngram, len(row)) or 1)) for row in units]
        prompts = columns.get("prompts") or [None] * len(runs)
        scores: ScoreList = []
        # groupby compares with ==, which message lists have; hashing them would not work.
        for _, rows in groupby(range(len(runs)), key=lambda row: prompts[row]):
            group = [runs[row] for row in rows]
            for row, first in enumerate(group):
                alike = [_similarity(first, second) for at, second in enumerate(group) if at != row]
                scores.append(self.penalty * sum(alike) / len(alike) if alike else 0.0)
        return scores


def _similarity(first: frozenset[Any], second: frozenset[Any]) -> float:
    """Shared over all n-grams; two empty completions are the same."""
    union = len(first | second)
    return len(first & second) / union if union else 1.0
