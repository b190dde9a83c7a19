"""Rewards for the length of a completion."""

import math
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from upweight.errors import UserError
from upweight.rewards.builtin.spec import builtin, builtin_reward
from upweight.rewards.builtin.text import ScoreList, Unit, units_of


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
        pairs = zip(
            judge(completions, **columns), units_of(completions, columns, self.unit, self.__name__), strict=True
        )
        return [None if mark is None else self.scaled(mark, length) for mark, length in pairs]

    def scaled(self, mark: float, length: int) -> float:
        """The score of a completion that was judged right (0.5 and above) or wrong, by its length."""
        if length > self.max_length and self.too_long is not None:
            return self.too_long
        right = mark >= 0.5
        short, long = (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        share = min(length / self.max_length, 1.0)
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * share))
