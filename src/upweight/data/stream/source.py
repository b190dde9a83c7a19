"""Sources of a feed: each yields encoded rows pass after pass, and says in a few JSON values where it stands."""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from upweight.data.cache import digest, rows_digest
from upweight.data.sources.streams import CHUNK_ROWS, Position, RowStream
from upweight.data.stored_columns import OTHERS, schema_of, with_columns
from upweight.data.stream.ahead import EncodePool, Raw, ReadAhead
from upweight.data.workers import EncodeJob
from upweight.errors import UserError
from upweight.log import warn_once

BLOCK_BYTES = 1 << 28  # of encoded rows, after which a block ends early
NO_ORDER = np.zeros(0, np.int64)


class RowSource(Protocol):
    """Rows in passes: each pass yields every row once, in an order of its own."""

    where: str

    def next(self) -> dict[str, Any] | None:
        """Return the next row; None once at the end of each pass."""
        ...

    def count(self) -> int | None:
        """Return the rows of a pass, where they are known before they are read."""
        ...

    def identity(self) -> Any:
        """Return JSON values that change with the rows, as far as that can be known without reading them."""
        ...

    def state(self) -> dict[str, Any]:
        """Return where it stands, as JSON values."""
        ...

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go to where it stood; None is the beginning."""

    def prefetch(self) -> None:
        """Begin to read ahead."""

    def close(self) -> None:
        """End threads and drop what was read ahead."""


@dataclass(frozen=True)
class Window:
    """The rows of a stream that are used, by their numbers: evaluation may hold out the first ones."""

    first: int = 0
    end: int | None = None

    def part(self, rows: Any, before: int) -> Any:
        """Return the rows of a chunk that lie in the window; `before` rows come before the chunk."""
        stop = len(rows) if self.end is None else max(self.end - before, 0)
        start = max(self.first - before, 0)
        if start == 0 and stop >= len(rows):
            return rows
        return replace(rows, first=rows.first + start, content=rows.content[start:stop])


class StreamSource:
    """A stream in blocks of `buffer` rows, each shuffled as a whole and encoded while the one before is trained on.

    Where it stands is the position before the current block and the rows taken of the block: a resume reads the block
    again, shuffles it by the same seed and goes on after the same row. So nothing of the shuffle buffer is lost, and a
    checkpoint holds a few numbers in place of its rows.
    """

    def __init__(
        self,
        job: EncodeJob,
        streams: Sequence[RowStream],
        pool: EncodePool,
        *,
        buffer: int,
        seed: int | None,
        window: Window = Window(),  # noqa: B008
        counted: bool = True,
    ) -> None:
        self.number, self.where, self.method = pool.add(job), job.where, job.encoder.setup.method
        self.streams, self.pool, self.window = list(streams), pool, window
        self.counted = counted  # whether each row that is read is one that is trained on
        self.buffer, self.seed = buffer, seed  # no seed: in their order
        self.dropped: Counter[str] = Counter()
        self._ahead: ReadAhead | None = None
        self.restore(None)

    def count(self) -> int | None:
        """Return the rows that the files say they have, or `max_samples` where that is what ends a pass."""
        if not self.counted:
            return None
        counts = [stream.count() for stream in self.streams]
        known = None if None in counts else sum(count or 0 for count in counts)
        ends = [end for end in (known, self.window.end) if end is not None]
        return max(min(ends) - self.window.first, 0) if ends else None

    def identity(self) -> Any:
        return [[stream.identity() for stream in self.streams], [self.window.first, self.window.end], self.buffer]

    def state(self) -> dict[str, Any]:
        return {**self._block, "taken": self._taken}

    def restore(self, state: dict[str, Any] | None) -> None:
        self.close()
        self._block: dict[str, Any] = {"pass": 0, "block": 0, "position": None, "read": 0}
        self._after: tuple[Position, int] | None = None  # position and rows read after the current block, once loaded
        self._rows, self._order, self._taken = pa.table({}), NO_ORDER, 0
        self._has_rows = False  # so far in this pass
        if state is not None:
            self._block = {name: state[name] for name in self._block}
            self._has_rows = state["block"] > 0
            if state["taken"]:
                self._load()
                self._taken = state["taken"]

    def prefetch(self) -> None:
        """Begin to read."""
        if self._ahead is None:
            depth = -(-self.buffer // CHUNK_ROWS) + self.pool.processes
            raw = self._raw(self._block["position"], self._block["read"], self._block["pass"])
            self._ahead = ReadAhead(raw, lambda rows: self.pool.submit(self.number, rows), depth)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def next(self) -> dict[str, Any] | None:
        if self._taken >= len(self._order) and not self._advance():
            return None
        row = self._rows.slice(int(self._order[self._taken]), 1).to_pylist()[0]
        self._taken += 1
        return row | json.loads(row.pop(OTHERS)) if OTHERS in row else row

    def next_block(self) -> pa.Table | None:
        """Return the rows of the next block, in order; None at the end of a pass."""
        return self._rows if self._advance() else None

    def _advance(self) -> bool:
        """Load the next block that has rows; at the end of a pass go back to the beginning and return False."""
        while True:
            if self._after is not None:
                position, read = self._after
                self._block |= {"block": self._block["block"] + 1, "position": position, "read": read}
            if self._load():
                if len(self._order):
                    return True
                continue
            if not self._has_rows:
                reasons = "; ".join(f"{count} dropped: {reason}" for reason, count in self.dropped.most_common())
                raise UserError(f"{self.where}: has no rows{f' that can be used ({reasons})' if reasons else ''}.")
            self.close()
            self._block = {"pass": self._block["pass"] + 1, "block": 0, "position": None, "read": 0}
            self._after, self._order, self._taken, self._has_rows = None, NO_ORDER, 0, False
            return False

    def _load(self) -> bool:
        """Read the block after the current position; return whether there was one."""
        self.prefetch()
        assert self._ahead is not None
        batches: list[pa.RecordBatch] = []
        rows = size = 0
        self._rows, self._order, self._taken = pa.table({}), NO_ORDER, 0
        while rows < self.buffer and size < BLOCK_BYTES and (encoded := self._ahead.take()) is not None:
            chunk, self._after = encoded.chunk, (encoded.position, encoded.read)
            rows, size = rows + chunk.rows, size + chunk.batch.nbytes
            batches.append(chunk.batch)
            self.dropped += chunk.dropped
            if len(chunk.batch) > chunk.rows and self.count() is not None:  # a chat template changes earlier turns
                problem = "some rows become several sequences, and an epoch has as many sequences as there are rows"
                warn_once(f"{self.where}: {problem}; set 'max_steps' for all of them")
            for reason in chunk.dropped:
                warn_once(f"{self.where}: some rows of the stream are dropped: {reason}")
            for note in chunk.notes:
                warn_once(f"{self.where}: some rows of the stream are {note}")
        if not batches:
            return False
        self._has_rows |= any(len(batch) for batch in batches)
        self._rows = pa.Table.from_batches(batches).combine_chunks()
        self._order = np.arange(len(self._rows))
        if self.seed is not None:
            place = (self.seed, self.number, self._block["pass"], self._block["block"])
            np.random.default_rng(place).shuffle(self._order)
        return True

    def _raw(self, position: Position, read: int, epoch: int) -> Raw:
        """Yield the raw chunks after a position, cut to the window, with the rows read after each."""
        number, inside = position or (0, None)
        for index in range(number, len(self.streams)):
            for rows, after in self.streams[index].chunks(inside, epoch):
                part = self.window.part(rows, read)
                read += len(rows)
                if len(part):
                    yield part, [index, after], read
                if self.window.end is not None and read >= self.window.end:
                    return
            inside = None


class PreparedSource:
    """Prepared rows of one dataset, in an order by seed and pass."""

    def __init__(self, number: int, where: str, rows: Dataset, *, seed: int | None) -> None:
        self.number, self.where, self.rows, self.seed = number, where, rows, seed
        if not len(rows):
            raise UserError(f"{where}: no row is left to train on.")
        self.restore(None)

    def count(self) -> int | None:
        return len(self.rows)

    def identity(self) -> Any:
        return rows_digest(self.rows)

    def state(self) -> dict[str, Any]:
        return {"pass": self._pass, "taken": self._taken}

    def restore(self, state: dict[str, Any] | None) -> None:
        self._begin(*((0, 0) if state is None else (state["pass"], state["taken"])))

    def _begin(self, number: int, taken: int) -> None:
        self._pass, self._taken = number, taken
        self._order: NDArray[np.int64] = np.arange(len(self.rows))
        if self.seed is not None:
            np.random.default_rng((self.seed, self.number, number)).shuffle(self._order)

    def next(self) -> dict[str, Any] | None:
        if self._taken >= len(self._order):
            self._begin(self._pass + 1, 0)
            return None
        self._taken += 1
        return dict(self.rows[int(self._order[self._taken - 1])])

    def prefetch(self) -> None:
        """Do nothing: rows are prepared."""

    def close(self) -> None:
        """Do nothing: nothing is read ahead."""


def stored(sources: Sequence[StreamSource]) -> Dataset:
    """Read one pass of some streams into prepared rows, which lie in a file that no folder lists any more."""
    schema, names = pa.schema(list(schema_of(sources[0].method).items())), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.arrow"
        with pa.ipc.new_stream(str(file), schema) as writer:
            for source in sources:
                while (block := source.next_block()) is not None:
                    writer.write_table(block)
                    names |= {name for name in schema.names if block.column(name).null_count < len(block)}
                    if OTHERS in schema.names:
                        names |= {name for text in block.column(OTHERS).to_pylist() for name in json.loads(text)}
                source.close()
        return with_columns(Dataset.from_file(str(file)), names)


def stored_and_closed(source: StreamSource) -> Dataset:
    """Read one pass of a stream into prepared rows, and end its processes."""
    try:
        return stored([source])
    finally:
        source.close()
        source.pool.close()


def feed_digest(sources: Sequence[RowSource], settings: Any) -> str:
    """Return a hash of what is known of a feed's rows."""
    return digest([[source.identity() for source in sources], settings])
