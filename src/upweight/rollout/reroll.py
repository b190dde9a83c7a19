"""Prompts that all completions failed, tried again later in training."""

from collections import deque
from collections.abc import Sequence

import torch

from upweight.types import Group

NOTHING = 1e-6


class Reroll:
    """A bounded queue of failed prompts; after a share of training some of them come up in every rollout."""

    def __init__(self, start: float, most: int, capacity: int) -> None:
        self.start, self.most = start, most
        self.waiting: deque[int] = deque(maxlen=capacity)

    def note(self, groups: Sequence[Group]) -> None:
        """Remember the prompts whose completions all earned nothing."""
        for group in groups:
            if failed(group) and group.number not in self.waiting:
                self.waiting.append(group.number)

    def take(self, progress: float, room: int) -> list[int]:
        """At most `room` row numbers to try again now; `progress`: share of training that is done."""
        if progress < self.start:
            return []
        return [self.waiting.popleft() for _ in range(min(self.most, room, len(self.waiting)))]


def failed(group: Group) -> bool:
    """Whether every reward of every completion that applies is nothing."""
    assert group.rewards_SR is not None
    known = group.rewards_SR[~group.rewards_SR.isnan()]
    return bool(len(known)) and bool(torch.all(known.abs() < NOTHING))
