"""The loaders of offline methods: one item holds the units of one optimizer step, of all ranks."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback

from upweight.data.stream.feed import RowFeed
from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.files import write_text
from upweight.methods.base import Method
from upweight.types import Unit

FEED_STATE = "stream.json"
STEPS_KEPT = 4  # whose units can be shown after a loss of NaN


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


def is_prepared(rows: Any, like: Any) -> bool:
    """Return whether rows, or each of several named sets, have the columns of prepared ones, as far as these say."""
    if isinstance(rows, Mapping):
        return all(is_prepared(part, like) for part in rows.values())
    needed = getattr(like, "column_names", None) or ()
    return set(needed) <= set(getattr(rows, "column_names", None) or ())


def require_prepared(rows: Any, like: Any) -> None:
    """Raise where a script has put rows as they were given in place of the prepared training rows."""
    if not is_prepared(rows, like):
        problem = "was replaced after the trainer was made, which prepares rows then"
        raise UserError(f"train_dataset: {problem}. Make the trainer again, with these rows as 'train_dataset'.")


def _collate(rows: Sequence[Mapping[str, Any]], method: Method, *, compare: bool) -> dict[str, list[Unit]]:
    return {"units": units_of(rows, method, compare=compare)}


def step_loader(rows: Any, method: Method, sampler: StepBatchSampler, **options: Any) -> DataLoader[Any]:
    """Return a loader of whole steps; each rank picks its share of every step."""
    # In shuffled rows, two completions of one prompt are rarely in the same step.
    collate = partial(_collate, method=method, compare=not sampler.shuffle)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, **options)


class FeedLoader:
    """The loader of a feed: yields the remaining steps of an epoch, or steps without end where its length is unknown.

    Every rank takes all rows of a step and packs its share of them, so no rank is ahead of another.
    """

    def __init__(
        self,
        feed: RowFeed,
        method: Method,
        batch_size: int,
        steps_done: Callable[[], int],
        *,
        compare: bool,
        drop_last: bool = False,
    ) -> None:
        self.dataset, self.method, self.batch_size = feed, method, batch_size
        self.steps_done, self.compare, self.drop_last = steps_done, compare, drop_last
        self._last: deque[tuple[int, list[Unit]]] = deque(maxlen=STEPS_KEPT)

    def __len__(self) -> int:
        rows: int = len(self.dataset)
        return max(rows // self.batch_size, 1) if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        in_epoch = self.dataset.epoch_rows
        for _ in count() if in_epoch is None else range(self.steps_done() % len(self), len(self)):
            step, size = self.steps_done(), self.batch_size
            if in_epoch is not None and not self.drop_last:  # the last step of an epoch has what is left of it
                size = min(size, in_epoch - self.dataset.taken % in_epoch)
            rows = self.dataset.take(size, step)
            units = units_of([fed.row for fed in rows], self.method, compare=self.compare)
            self._last.append((step, units))
            yield {"units": units, "sources": [rows[unit.group].source for unit in units]}

    def units_of_step(self, step: int) -> list[Unit]:
        """Return the units of one of the last steps; none of an earlier one."""
        return next((units for number, units in self._last if number == step), [])


class SaveFeed(TrainerCallback):
    """Saves where a feed stands to each checkpoint."""

    def __init__(self, feed: RowFeed) -> None:
        self.feed = feed

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            write_text(folder / FEED_STATE, json.dumps(self.feed.state()))


def restore_feed(feed: RowFeed, checkpoint: Path) -> None:
    """Let a feed go on from where it stood at a checkpoint."""
    if not (checkpoint / FEED_STATE).is_file():
        raise UserError(f"resume_from_checkpoint: {checkpoint} has no {FEED_STATE}: no run on these streams wrote it.")
    state = json.loads((checkpoint / FEED_STATE).read_text(encoding="utf-8"))
    if len(state["sources"]) != len(feed.sources):
        problem = f"was written with {len(state['sources'])} datasets, and there are {len(feed.sources)} now"
        raise UserError(f"resume_from_checkpoint: {checkpoint} {problem}. Restore `datasets`, or begin a new run.")
    feed.restore(state)
