"""Prompts whose completions all earned nothing, sampled again later in training."""

from collections import deque
from collections.abc import Sequence

import torch

from upweight.types import Group

ZERO = 1e-6  # absolute rewards below this count as none


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

    def take(self, progress: float, room: int) -> list[int]:
        """Return at most `room` row numbers to sample again; `progress` is the share of training that is done."""
        if progress < self.start:
            return []
        return [self.waiting.popleft() for _ in range(min(self.most, room, len(self.waiting)))]


def failed(group: Group) -> bool:
    """Whether all rewards that apply to the completions of a group are zero."""
    assert group.rewards_SR is not None
    known = group.rewards_SR[~group.rewards_SR.isnan()]
    return bool(len(known)) and bool(torch.all(known.abs() < ZERO))
