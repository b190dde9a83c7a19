"""The sizes of a rollout, and the order in which prompts are sampled."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Plan:
    """How many completions are sampled together and trained on together, over all ranks."""

    groups: int  # prompts of a rollout
    group_size: int  # completions of a prompt
    step_size: int  # completions that one optimizer step trains on
    iterations: int = 1  # passes over a rollout

    @staticmethod
    def fitting(wanted: int, group_size: int, step_size: int, iterations: int = 1) -> "Plan":
        """Return the smallest multiple of `wanted` completions that holds whole groups and whole steps."""
        return Plan(lcm(wanted, group_size, step_size) // group_size, group_size, step_size, iterations)

    @property
    def steps_per_pass(self) -> int:
        """The optimizer steps of one pass over a rollout."""
        return self.groups * self.group_size // self.step_size

    @property
    def steps_per_rollout(self) -> int:
        """The optimizer steps of all passes over a rollout."""
        return self.steps_per_pass * self.iterations

    def steps_per_epoch(self, prompts: int) -> int:
        """Return the optimizer steps after which every prompt was sampled once."""
        return max(1, ceil(Fraction(prompts * self.group_size * self.iterations, self.step_size)))


class PromptOrder:
    """An endless order of row numbers: each epoch has every row once, shuffled by the seed and the epoch."""

    def __init__(self, rows: int, seed: int, *, shuffle: bool = True) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.position = 0  # rows taken so far, over all epochs
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def take(self, count: int, step: int = 0) -> list[int]:
        """Return the numbers of the next rows, which do not depend on the step."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, start = divmod(self.position, self.rows)
            part = self._order_of(epoch)[start : start + count - len(taken)].tolist()
            taken += part
            self.position += len(part)
        return taken

    def state(self) -> dict[str, Any]:
        """Return where it stands, as JSON values."""
        return {"position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where it stood."""
        self.position = state["position"]

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.arange(self.rows)
            if self.shuffle:
                np.random.default_rng((self.seed, epoch)).shuffle(self._order)
        return self._order
