"""Groups worth training on again, to take the place of groups without signal."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from upweight.rollout.rollout import group_from_plain, group_to_plain
from upweight.rollout.summary import has_signal, spread
from upweight.types import Group


class ReplayBuffer:
    """The best of the groups that had signal, each for at most so many optimizer steps."""

    def __init__(self, size: int, max_age: int) -> None:
        self.size, self.max_age = size, max_age
        self.kept: list[Group] = []

    def fill(self, groups: Sequence[Group], step: int, seed: Sequence[int]) -> tuple[list[Group], dict[str, float]]:
        """The groups with those that have no signal replaced by kept ones, and what is to be logged.

        A kept group is drawn in proportion to its worth and at most once. What is replaced was sampled and scored,
        and found to teach nothing; what is new and has signal is kept from now on.
        """
        self.kept = [group for group in self.kept if step - group.version <= self.max_age]
        dull = [place for place, group in enumerate(groups) if not has_signal(group)]
        chosen = self._draw(len(dull), seed)
        filled = list(groups)
        for place, group in zip(dull, chosen, strict=False):
            filled[place] = dataclasses.replace(group, replayed=True)
        ages = [step - group.version for group in chosen]
        fresh = [group for group in groups if has_signal(group)]
        self.kept = sorted([*self.kept, *fresh], key=worth, reverse=True)[: self.size]
        metrics = {"replay/kept": float(len(self.kept)), "replay/replaced": float(len(chosen))}
        return filled, metrics | ({"replay/age": sum(ages) / len(ages)} if ages else {})

    def state(self) -> list[dict[str, Any]]:
        """The kept groups as plain values."""
        return [group_to_plain(group) for group in self.kept]

    def restore(self, state: Sequence[Mapping[str, Any]], rows: Any) -> None:
        """Keep what `state` kept."""
        self.kept = [group_from_plain(plain, rows) for plain in state]

    def _draw(self, count: int, seed: Sequence[int]) -> list[Group]:
        count = min(count, len(self.kept))
        if not count:
            return []
        weights = np.array([max(worth(group), 1e-8) for group in self.kept])
        random = np.random.default_rng((*seed, 2**31 + 1))
        numbers = random.choice(len(self.kept), count, replace=False, p=weights / weights.sum())
        return [self.kept[number] for number in numbers]


def worth(group: Group) -> float:
    """How much a group can teach: the size of its advantages times the spread of its rewards."""
    assert group.advantage_S is not None
    return float(group.advantage_S.abs().sum()) * spread(group)
