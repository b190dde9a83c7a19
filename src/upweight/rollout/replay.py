"""Groups and prompts that are used again: in place of groups without signal, and where all completions failed."""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from upweight.rollout.rollout import group_from_plain, group_to_plain
from upweight.rollout.summary import has_signal, spread
from upweight.types import Group

ZERO_REWARD = 1e-6  # absolute rewards below this count as none


class ReplayBuffer:
    """Keeps the most useful groups that had signal, each for at most `max_age` optimizer steps."""

    def __init__(self, size: int, max_age: int) -> None:
        self.size, self.max_age = size, max_age
        self.kept: list[Group] = []

    def fill(self, groups: Sequence[Group], step: int, seed: Sequence[int]) -> tuple[list[Group], dict[str, float]]:
        """Replace groups without signal by kept ones, and keep the new groups with signal; also return metrics."""
        # Kept groups are drawn in proportion to `worth`, each at most once.
        self.kept = [group for group in self.kept if step - group.version <= self.max_age]
        without_signal = [index for index, group in enumerate(groups) if not has_signal(group)]
        drawn: list[Group] = []
        if count := min(len(without_signal), len(self.kept)):
            weights = np.array([max(worth(group), 1e-8) for group in self.kept])
            random = np.random.default_rng((*seed, 2**31 + 1))
            numbers = random.choice(len(self.kept), count, replace=False, p=weights / weights.sum())
            drawn = [self.kept[number] for number in numbers]
        filled = list(groups)
        for index, group in zip(without_signal, drawn, strict=False):
            filled[index] = dataclasses.replace(group, replayed=True)
        ages = [step - group.version for group in drawn]
        fresh = [group for group in groups if has_signal(group)]
        self.kept = sorted([*self.kept, *fresh], key=worth, reverse=True)[: self.size]
        metrics = {"replay/kept": float(len(self.kept)), "replay/replaced": float(len(drawn))}
        return filled, metrics | ({"replay/age": sum(ages) / len(ages)} if ages else {})

    def state(self) -> list[dict[str, Any]]:
        """Return the kept groups as JSON values, for a checkpoint."""
        return [group_to_plain(group) for group in self.kept]

    def restore(self, state: Sequence[Mapping[str, Any]], rows: Any) -> None:
        self.kept = [group_from_plain(plain, rows) for plain in state]


def worth(group: Group) -> float:
    """Return how much a group can teach: the sum of its absolute advantages times the spread of its rewards."""
    assert group.advantage_S is not None
    return float(group.advantage_S.abs().sum()) * spread(group)


class Reroll:
    """A bounded queue of failed prompts, some of which join every rollout after a share of training."""

    def __init__(self, start: float, most: int, capacity: int) -> None:
        self.start, self.most = start, most
        self.waiting: deque[int] = deque(maxlen=capacity)

    def note(self, groups: Sequence[Group]) -> None:
        """Queue the prompts whose completions all earned nothing."""
        for group in groups:
            if failed(group) and group.number not in self.waiting:
                self.waiting.append(group.number)

    def take(self, progress: float, limit: int) -> list[int]:
        """Return at most `limit` row numbers to sample again; `progress` is the share of training that is done."""
        if progress < self.start:
            return []
        return [self.waiting.popleft() for _ in range(min(self.most, limit, len(self.waiting)))]


def failed(group: Group) -> bool:
    """Whether all rewards that apply to the completions of a group are zero."""
    assert group.rewards_SR is not None
    known = group.rewards_SR[~group.rewards_SR.isnan()]
    return bool(len(known)) and bool(torch.all(known.abs() < ZERO_REWARD))
