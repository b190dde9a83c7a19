"""The feed of a training: rows of several sources in their mixture, endless, and exact from where it stood."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, floor
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upweight.data.stream.ahead import EncodePool
from upweight.data.stream.source import RowSource, feed_digest

Mix = Literal["concatenate", "interleave_under", "interleave_over", "interleave_once"]
ENDS_IN_TURN = ("concatenate", "interleave_once")  # a source that has ended waits for all others


def rows_of_epoch(mix: Mix, counts: Sequence[int | None], shares: Sequence[Sequence[float]]) -> int | None:
    """Return the rows of an epoch from those of each source and their shares by schedule; None: not known."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    if mix in ENDS_IN_TURN:
        return sum(known)
    if len(shares) > 1 or 0 in shares[0]:
        return None
    sizes = [count / share for count, share in zip(known, shares[0], strict=True)]
    return max(floor(min(sizes)), 1) if mix == "interleave_under" else ceil(max(sizes))


class FedRow(NamedTuple):
    """A prepared row and the number of its source."""

    source: int
    row: dict[str, Any]


@dataclass
class RowFeed:
    """Rows in the order in which they are trained on, on every rank alike.

    An interleaved source earns its share of each row, and whoever is owed most gives the next: after any number of rows
    each has given its share to within one row or so. A source that ends begins its next pass; `interleave_once` and
    `concatenate` wait until all have ended.
    """

    sources: Sequence[RowSource]
    names: Sequence[str]  # of the sources, in metrics
    mix: Mix = "concatenate"
    schedule: Sequence[tuple[int, Sequence[float]]] = ()  # weights from each step on; none: equal ones
    pool: EncodePool | None = None
    settings: Any = None  # JSON values that shape the rows
    taken: int = 0
    _owed: NDArray[np.float64] = field(init=False)
    _ended: list[bool] = field(init=False)
    _passes: list[int] = field(init=False)  # ends of each source
    _seen: list[FedRow] = field(init=False, default_factory=list)  # looked at before they were taken

    def __post_init__(self) -> None:
        self._begin()

    def __len__(self) -> int:
        """Return the rows of an epoch; a TypeError, as of any object without a length, where they are not known."""
        if self.epoch_rows is None:
            raise TypeError("the length of this stream is not known")
        return self.epoch_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the prepared rows of an epoch from the first on; afterwards the feed is where it was."""
        state = self.state() if self.taken else None
        self.restore(None)
        try:
            while True:
                row = self.take(1)[0].row
                if self._has_ended():
                    return
                yield row
        finally:
            self.restore(state)

    @cached_property
    def epoch_rows(self) -> int | None:
        """The rows of an epoch: every row once, or until the first or the last source has ended."""
        shares = [share.tolist() for share in map(self._shares, [step for step, _ in self.schedule] or [0])]
        return rows_of_epoch(self.mix, [source.count() for source in self.sources], shares)

    def digest(self) -> str:
        """Return a hash of what is known of the rows, for the comparison on a resume."""
        return feed_digest(self.sources, [self.mix, list(self.names), self.settings])

    def prefetch(self) -> None:
        """Begin to read and encode."""
        for source in self.sources:
            source.prefetch()

    def first(self) -> dict[str, Any]:
        """Return the row that is taken next, without taking it."""
        if not self._seen:
            self._seen.append(self._next(0))
        return self._seen[0].row

    def take(self, count: int, step: int = 0) -> list[FedRow]:
        """Return the next rows; `step` is the optimizer step that they are for, which chooses the weights."""
        rows = [self._seen.pop(0) if self._seen else self._next(step) for _ in range(count)]
        self.taken += count
        return rows

    def state(self) -> dict[str, Any]:
        """Return where the feed stands, as JSON values."""
        assert not self._seen, "a row that was looked at is taken before a checkpoint"
        return {
            "taken": self.taken,
            "owed": self._owed.tolist(),
            "ended": self._ended,
            "sources": [source.state() for source in self.sources],
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go to where the feed stood; None is the beginning."""
        if state is None and not self.taken:
            return
        self._begin()
        self._seen = []
        states = [None] * len(self.sources) if state is None else state["sources"]
        for source, of_source in zip(self.sources, states, strict=True):
            source.restore(of_source)
        if state is not None:
            self.taken, self._ended = state["taken"], list(state["ended"])
            self._owed = np.array(state["owed"])

    def close(self) -> None:
        """End the threads and processes that read ahead."""
        for source in self.sources:
            source.close()
        if self.pool is not None:
            self.pool.close()

    def _begin(self) -> None:
        self.taken, self._owed = 0, np.zeros(len(self.sources))
        self._ended, self._passes = [False] * len(self.sources), [0] * len(self.sources)

    def _next(self, step: int) -> FedRow:
        while True:
            share = self._shares(step)
            number = self._chosen(share)
            row = self.sources[number].next()
            if row is not None:
                if self.mix != "concatenate":
                    self._owed += share
                    self._owed[number] -= 1
                return FedRow(number, row)
            self._passes[number] += 1
            if self.mix in ENDS_IN_TURN:
                self._ended[number], self._owed[number] = True, 0.0
                if all(self._ended):
                    self._ended, self._owed = [False] * len(self.sources), np.zeros(len(self.sources))

    def _chosen(self, share: NDArray[np.float64]) -> int:
        """Return the source that gives the next row."""
        if self.mix == "concatenate":
            return self._ended.index(False)
        return int(np.argmax(np.where(share > 0, self._owed + share, -np.inf)))

    def _has_ended(self) -> bool:
        """Return whether the last row began another epoch, of the sources that have a share at first."""
        shares = zip(self._passes, self._shares(0), strict=True)
        passes = [passes for passes, share in shares if share or self.mix == "concatenate"]
        return any(passes) if self.mix == "interleave_under" else all(passes)

    def _shares(self, step: int) -> NDArray[np.float64]:
        """Return the share of each source at a step; sources that have ended have none."""
        if self.mix == "concatenate":
            return np.zeros(len(self.sources))
        weights = next((w for start, w in reversed(self.schedule) if start <= step), [1.0] * len(self.sources))
        active = np.array(weights, np.float64) * ~np.array(self._ended)
        if not active.any():  # only sources of weight 0 are left
            active = (~np.array(self._ended)).astype(np.float64)
        return active / active.sum()
