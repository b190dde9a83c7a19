"""The loader: one item is everything one optimizer step trains on, over all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from upweight.data.units import units_of
from upweight.methods.base import Method
from upweight.types import Unit


class StepSampler(Sampler[list[int]]):
    """Row numbers of each optimizer step; every rank sees the same, so that all plan alike without talking."""

    def __init__(self, rows: int, batch: int, seed: int, *, shuffle: bool, drop_last: bool = False) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch)
        for step in range(len(self)):
            yield order[step * self.batch : (step + 1) * self.batch].tolist()

    def __len__(self) -> int:
        return self.rows // self.batch if self.drop_last else -(-self.rows // self.batch)

    def rows_of(self, step: int) -> list[int]:
        """The rows of a step, counted from 0 over all epochs."""
        epoch, number = divmod(step, len(self))
        return self._order(epoch)[number * self.batch : (number + 1) * self.batch].tolist()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        order = np.arange(self.rows)
        if self.shuffle:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        return order


@dataclass(frozen=True)
class Collate:
    """Rows of a step -> its units; a named class, so that loader processes can be handed it."""

    method: Method
    compare: bool

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Unit]]:
        return {"units": units_of(rows, self.method, compare=self.compare)}


def step_loader(rows: Any, method: Method, sampler: StepSampler, **options: Any) -> DataLoader[Any]:
    """A loader of whole steps; it is not split over ranks, since each rank picks its share of every step."""
    # Shuffled, two answers to one prompt meet by chance, too seldom for a metric.
    collate = Collate(method, compare=not sampler.shuffle)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, **options)
