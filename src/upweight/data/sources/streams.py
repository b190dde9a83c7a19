"""Raw rows of files and iterable datasets, read in order from any position that a reader has stood at before."""

import copy
import csv
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import datasets
import pyarrow as pa
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from upweight.data.columns import csv_rows, surplus_cells
from upweight.data.sources.raw_files import COMPRESSED, explained_encoding
from upweight.data.sources.text_files import parse_line
from upweight.errors import UserError

CHUNK_ROWS = 256  # rows that are encoded together; a reader stops between two chunks only
CHUNK_BYTES = 1 << 22  # of lines, after which a chunk ends early
SKIP_BYTES = 1 << 20
PAGE_BYTES = 1 << 20  # of a parquet column, read at a time; without it a whole row group is, which may be a file
UNPACK_ERRORS = (EOFError, lzma.LZMAError, zlib.error)
READ_ERRORS = (OSError, ValueError, RuntimeError, pa.ArrowException, DatasetsError, csv.Error, *UNPACK_ERRORS)

Position = Any  # JSON values that say how far a source was read
Kind = Literal["json", "text", "table", "rows"]


@dataclass(frozen=True)
class RawChunk:
    """Consecutive raw rows, which are parsed by the process that encodes them, with their places in the file."""

    path: Path | None  # None: rows of no file
    kind: Kind
    first: int  # number of the first row
    content: Any  # lines with their numbers, a batch of Arrow, or rows
    sources: ClassVar[tuple[Any, ...]] = ()  # as a selection of rows has them

    def __len__(self) -> int:
        return len(self.content)

    def take(self, start: int, stop: int) -> list[Any]:
        """Return the parsed rows from `start` up to `stop`."""
        part = self.content[start:stop]
        if self.kind == "table":
            return part.to_pylist()
        if self.kind == "rows" or self.path is None:
            return part
        return [parse_line(self.path, raw, line, self.kind) for line, raw in part]

    def location(self, index: int) -> str:
        """Return the number of a row, counted from 0, with its file, and its line in a text file."""
        number = self.first + index
        if self.path is None:
            return f"row {number}"
        line = f":{self.content[index][0]}" if self.kind in ("json", "text") else ""
        return f"row {number} ({self.path.name}{line})"


Chunks = Iterator[tuple[RawChunk, Position]]  # each with the position after it


class FileStream:
    """The rows of several files, one after the other."""

    def __init__(self, files: Sequence[Path], kinds: Sequence[str]) -> None:
        self.files, self.kinds = list(files), list(kinds)

    def identity(self) -> list[Any]:
        """Return what identifies the files: name and size."""
        return [[file.name, file.stat().st_size] for file in self.files]

    def count(self) -> int | None:
        """Return the number of rows where the files say it."""
        if any(kind != "parquet" for kind in self.kinds):
            return None
        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in self.files)

    def chunks(self, position: Position, epoch: int) -> Chunks:
        """Yield the chunks after a position; None is the beginning."""
        number, inside = position or (0, None)
        for index in range(number, len(self.files)):
            file = self.files[index]
            try:
                with explained_encoding(file):
                    for chunk, after in READERS[self.kinds[index]](file, inside):
                        yield chunk, [index, after]
            except UserError:
                raise
            except READ_ERRORS as error:
                raise UserError(f"{file}: cannot be read ({str(error).splitlines()[0]}).") from error
            inside = None


class IterableStream:
    """The rows of an iterable dataset: a stream of the hub, or one that a script passes."""

    def __init__(self, dataset: datasets.IterableDataset) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise UserError("split_dataset_by_node: rows are divided over ranks here. Pass the stream undivided.")
        self.dataset = dataset.with_format(None)

    def identity(self) -> list[Any]:
        """Return what identifies the rows, as far as a stream says it: names of dataset and split."""
        info = self.dataset.info
        return [info.builder_name, info.dataset_name, info.config_name, str(self.dataset.split)]

    def count(self) -> int | None:
        """Return None: transforms may have changed what the dataset's card says."""
        return None

    def chunks(self, position: Position, epoch: int) -> Chunks:
        """Yield the chunks after a position; the dataset skips to it by its state."""
        dataset, first = copy.copy(self.dataset), 0
        dataset.set_epoch(epoch)
        if position is not None:
            first, state = position
            dataset.load_state_dict(copy.deepcopy(state))
        rows: list[Any] = []
        try:
            for row in dataset:
                rows.append(row)
                if len(rows) == CHUNK_ROWS:
                    yield RawChunk(None, "rows", first, rows), [first + len(rows), dataset.state_dict()]
                    first, rows = first + len(rows), []
        except READ_ERRORS as error:
            problem = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"the stream failed after row {first + len(rows)}: {problem[0]}") from error
        if rows:
            yield RawChunk(None, "rows", first, rows), [first + len(rows), dataset.state_dict()]


RowStream = FileStream | IterableStream


class StreamStart:
    """The first rows of a stream, read at once, for reports."""

    def __init__(self, stream: RowStream, count: int) -> None:
        self._rows: list[tuple[RawChunk, int]] = []
        for chunk, _ in stream.chunks(None, 0):
            self._rows += [(chunk, number) for number in range(min(len(chunk), count - len(self._rows)))]
            if len(self._rows) == count:
                break
        self._identity = [*stream.identity(), len(self._rows)]

    def identity(self) -> list[Any]:
        """Return what identifies the rows, as far as the stream says it."""
        return self._identity

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: Iterable[int]) -> list[Any]:
        """Return rows by their numbers."""
        return [row for index in indices for row in self._one(int(index))]

    def _one(self, index: int) -> list[Any]:
        chunk, number = self._rows[index]
        return chunk.take(number, number + 1)

    def location(self, index: int) -> str:
        """Return where a row comes from."""
        chunk, number = self._rows[index]
        return chunk.location(number)


def _lines(kind: Literal["json", "text"]) -> Callable[[Path, Position], Chunks]:
    def read(path: Path, position: Position) -> Chunks:
        """Yield chunks of the lines that are not blank; a position is bytes, lines and rows."""
        offset, line, row = position or (0, 0, 0)
        opener = COMPRESSED.get(path.suffix.lower())
        with open(path, "rb") if opener is None else opener(path, "rb") as file:
            if opener is None:
                file.seek(offset)
            else:
                _skip(file, offset)
            lines: list[tuple[int, bytes]] = []
            size = 0
            for raw in file:
                line, offset = line + 1, offset + len(raw)
                if not raw.strip():
                    continue
                if not row and not lines and kind == "json" and raw.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                    remedy = "Write one object on each line, or leave out 'streaming'."
                    raise UserError(f"{path}: is one JSON list, which cannot be read row by row. {remedy}")
                lines.append((line, raw.rstrip(b"\r\n")))
                size += len(raw)
                if len(lines) == CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield RawChunk(path, kind, row, lines), [offset, line, row + len(lines)]
                    row, lines, size = row + len(lines), [], 0
            if lines:
                yield RawChunk(path, kind, row, lines), [offset, line, row + len(lines)]

    return read


def _skip(file: Any, count: int) -> None:
    """Read and drop so many bytes of a compressed file."""
    while count > 0 and (part := file.read(min(count, SKIP_BYTES))):
        count -= len(part)


def _read_parquet(path: Path, position: Position) -> Chunks:
    """Yield chunks within row groups; a position is a row group and the rows read of it."""
    group, done = position or (0, 0)
    with pyarrow.parquet.ParquetFile(path, buffer_size=PAGE_BYTES, pre_buffer=False) as file:
        first = sum(file.metadata.row_group(number).num_rows for number in range(group))
        for number in range(group, file.num_row_groups):
            row = 0
            for batch in file.iter_batches(CHUNK_ROWS, row_groups=[number]):
                row += len(batch)
                if row > done:
                    yield RawChunk(path, "table", first + row - len(batch), batch), [number, row]
            first, done = first + row, 0


def _read_arrow(path: Path, position: Position) -> Chunks:
    """Yield chunks of a file in either of Arrow's formats; a position is the rows read."""
    row, done = 0, position or 0
    with pa.OSFile(str(path)) as file:  # pages of a mapped file would count as memory
        for batch in _arrow_batches(file):
            for start in range(0, len(batch), CHUNK_ROWS):
                part = batch.slice(start, CHUNK_ROWS)
                row += len(part)
                if row > done:
                    yield RawChunk(path, "table", row - len(part), part), row


def _arrow_batches(file: Any) -> Iterator[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        yield from pa.ipc.open_stream(file)
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _read_csv(path: Path, position: Position) -> Chunks:
    """Yield chunks of a CSV, whose cells are text; a position is the rows read."""
    row, done = 0, position or 0
    opener = COMPRESSED.get(path.suffix.lower(), open)
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        rows: list[dict[str, Any]] = []
        for cells in csv_rows(path, file):
            if (problem := surplus_cells(cells)) is not None:
                raise UserError(f"{path}: row {row} {problem}.")
            row += 1
            if row > done:
                rows.append(cells)
            if len(rows) == CHUNK_ROWS:
                yield RawChunk(path, "rows", row - len(rows), rows), row
                rows = []
        if rows:
            yield RawChunk(path, "rows", row - len(rows), rows), row


READERS: dict[str, Callable[[Path, Position], Chunks]] = {
    "json": _lines("json"),
    "text": _lines("text"),
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "csv": _read_csv,
}
