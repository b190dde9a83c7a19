"""Penalties for repetition within a completion and for similarity among the completions of a group."""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from upweight.rewards.builtin.spec import builtin
from upweight.rewards.builtin.text import ScoreList, Unit, texts_of, units_of

Penalty = Annotated[float, Field(le=0)]


def ngrams(units: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """Units -> their runs of `size`, in order."""
    return list(zip(*(units[shift:] for shift in range(size)), strict=False))


@builtin
class RepetitionReward:
    """Gives the penalty times the share of n-grams that repeat earlier ones of the same completion."""

    ngram: PositiveInt = 3
    unit: Unit = "words"
    penalty: Penalty = -1.0
    __name__ = "repetition"

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        folded = [text.casefold() for text in texts_of(completions)]
        return [self.penalised(units) for units in units_of(folded, columns, self.unit, self.__name__)]

    def penalised(self, units: Sequence[Any]) -> float:
        """Return the penalty times the share of repeated n-grams."""
        runs = ngrams(units, self.ngram)
        return self.penalty * (1 - len(set(runs)) / len(runs)) if runs else 0.0


@builtin
class DiversityReward:
    """Gives the penalty times the mean n-gram similarity to the other completions of the same prompt."""

    ngram: PositiveInt = 2
    unit: Unit = "words"
    penalty: Penalty = -1.0
    __name__ = "diversity"

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        folded = [text.casefold() for text in texts_of(completions)]
        units = units_of(folded, columns, self.unit, self.__name__)
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
