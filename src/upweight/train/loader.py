"""The loader of offline methods: one item holds the units of one optimizer step, of all ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from upweight.data.units import units_of
from upweight.methods.base import Method
from upweight.types import Unit


@dataclass(eq=False)
class StepBatchSampler(Sampler[list[int]]):
    """Yields the row numbers of each optimizer step, the same on every rank, so that all ranks plan alike."""

    num_rows: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool = False
    steps_done: Callable[[], int] = lambda: 0  # so far in the training: they decide the epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._epoch_order(self.steps_done() // len(self))
        for step in range(len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size].tolist()

    def __len__(self) -> int:
        return self.num_rows // self.batch_size if self.drop_last else -(-self.num_rows // self.batch_size)

    def rows_of(self, step: int) -> list[int]:
        """Return the row numbers of a step, counted from 0 over all epochs."""
        epoch, number = divmod(step, len(self))
        return self._epoch_order(epoch)[number * self.batch_size : (number + 1) * self.batch_size].tolist()

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        order = np.arange(self.num_rows)
        if self.shuffle:
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        return order


def _collate(rows: Sequence[Mapping[str, Any]], method: Method, *, compare: bool) -> dict[str, list[Unit]]:
    return {"units": units_of(rows, method, compare=compare)}


def step_loader(rows: Any, method: Method, sampler: StepBatchSampler, **options: Any) -> DataLoader[Any]:
    """Return a loader of whole steps; each rank picks its share of every step."""
    # In shuffled rows, two completions of one prompt are rarely in the same step.
    collate = partial(_collate, method=method, compare=not sampler.shuffle)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, **options)
