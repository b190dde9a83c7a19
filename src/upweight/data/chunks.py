"""Encodes rows into Arrow batches, a few hundred rows at a time, in one process or several."""

import hashlib
import json
import multiprocessing
import os
import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from upweight.config.sections.data import DataSection
from upweight.data.encode import Encoder
from upweight.data.formats import kind_of
from upweight.data.raw_row import Record, RowError
from upweight.data.report import lengths_of
from upweight.data.sources.open import GivenTable, RowSelection
from upweight.data.tokenize.lengths import apply_length_rules
from upweight.errors import UserError, did_you_mean
from upweight.methods.base import Method

CHUNK = 512  # rows encoded together
WORTH_FORKING = 20_000  # rows below which more processes cost more than they bring
MOST_PROCESSES = 16
OTHERS = "others"  # column that holds all further columns of a row as JSON

RENAMED = {  # columns that a `type` mapping can name, by the kind of data
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "text": ("instruction", "output"),
    "prompts": ("prompt",),
}

IDS, FLAGS = pa.list_(pa.int32()), pa.list_(pa.bool_())
SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "text": {"ids": IDS, "scored": FLAGS},
    "pairs": {"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS, "margin": pa.float64()},
    "labelled": {"prompt_ids": IDS, "completion_ids": IDS, "label": pa.bool_()},
    "steps": {"ids": IDS, "labels": IDS},
    "prompts": {"prompt_ids": IDS, OTHERS: pa.large_string()},
    "documents": {"ids": IDS, "scored": FLAGS, "prompt_length": pa.int32(), OTHERS: pa.large_string()},
}


def schema_of(method: Method) -> dict[str, pa.DataType]:
    """Return the Arrow types of a method's columns."""
    return SCHEMAS["documents" if method.strided else method.data]


@dataclass(frozen=True)
class EncodeJob:
    """The rows of one entry that are used for training or for evaluation, and how they are encoded."""

    where: str
    evaluation: bool
    rows: RowSelection
    encoder: Encoder
    rules: DataSection
    method: Method


@dataclass
class Chunk:
    """The encoded records of consecutive rows of a job."""

    batch: pa.RecordBatch
    origin_N2: NDArray[np.int64]  # row of the job, and number among that row's records
    length_M3: NDArray[np.int64]  # prompt, completion, sequence; of every record, kept or not
    names: set[str] = field(default_factory=set)  # columns that any record has
    digests: list[bytes] = field(default_factory=list)  # of the records kept, for deduplication
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


def encode_all(jobs: Sequence[EncodeJob], *, processes: int | None, digests: bool) -> Iterator[tuple[int, int, Chunk]]:
    """Yield every chunk in order as (number of its job, number of its rows, chunk)."""
    tasks = (
        (number, start, min(start + CHUNK, len(job.rows)))
        for number, job in enumerate(jobs)
        for start in range(0, len(job.rows), CHUNK)
    )
    total = sum(len(job.rows) for job in jobs)
    count = min(_processes(processes, total), -(-total // CHUNK))
    if count <= 1:
        for number, start, stop in tasks:
            yield number, stop - start, encode_chunk(jobs[number], start, stop, digests)
        return
    _Work.jobs, _Work.digests = jobs, digests
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), initializer=_start_process)
    waiting: deque[tuple[int, int, Future[Chunk]]] = deque()
    try:
        for number, start, stop in tasks:
            waiting.append((number, stop - start, pool.submit(_work, number, start, stop)))
            if len(waiting) > 2 * count:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    finally:
        pool.shutdown(cancel_futures=True)
        _Work.jobs = ()


class _Work:
    """What forked processes find without it being sent to them."""

    jobs: Sequence[EncodeJob] = ()
    digests: bool = False


def _work(number: int, start: int, stop: int) -> Chunk:
    return encode_chunk(_Work.jobs[number], start, stop, _Work.digests)


def _start_process() -> None:
    # The processes already keep all cores busy; threads inside them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _next(waiting: deque[tuple[int, int, Future[Chunk]]]) -> tuple[int, int, Chunk]:
    number, rows, future = waiting.popleft()
    try:
        return number, rows, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "dataset_num_proc: a process that prepares data died, most likely for lack of memory. Set a lower number."
        ) from error


def _processes(configured: int | None, rows: int) -> int:
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    if configured is not None:
        return configured
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if rows >= WORTH_FORKING else 1


def encode_chunk(job: EncodeJob, start: int, stop: int, digests: bool) -> Chunk:
    """Encode the rows from `start` to `stop`; a row that cannot be used raises a UserError with its place."""
    schema = schema_of(job.method)
    columns: dict[str, list[Any]] = {name: [] for name in schema}
    chunk = Chunk(pa.RecordBatch.from_pylist([]), np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int64))
    origin, lengths = [], []
    for row, records in enumerate(_encode(job, start, stop), start):
        for number, record in enumerate(records):
            lengths.append(lengths_of(record.columns))
            kept, reason = within_limits(job, row, record)
            if reason is not None:
                (chunk.dropped if kept is None else chunk.notes)[reason] += 1
            if kept is None:
                continue
            origin.append((row, number))
            _append(columns, kept.columns, chunk.names)
            if digests:
                content = json.dumps(kept.columns, sort_keys=True, default=str)
                chunk.digests.append(hashlib.blake2b(content.encode(), digest_size=16).digest())
    chunk.batch = pa.record_batch([pa.array(values, schema[name]) for name, values in columns.items()], list(schema))
    chunk.origin_N2 = np.array(origin, np.int64).reshape(-1, 2)
    chunk.length_M3 = np.array(lengths, np.int64).reshape(-1, 3)
    return chunk


def _encode(job: EncodeJob, start: int, stop: int) -> list[list[Record]]:
    rows = job.rows.take(start, stop)
    try:
        return job.encoder.encode_many(rows)
    except RowError:
        for number, row in enumerate(rows, start):
            try:
                job.encoder(row)
            except RowError as error:
                raise bad_row(job, number, error, row) from error
        raise


def bad_row(job: EncodeJob, row: int, error: RowError, content: Any = None) -> UserError:
    """Return the error about a row: dataset, row number, key, what was expected, and the columns of `content`."""
    columns, key = "", re.split(r"[.[]", error.key)[0]
    if isinstance(content, Mapping) and key not in content and job.encoder.transform is None:
        names = ", ".join(map(str, content)) or "no columns"
        columns = f".{did_you_mean(key, list(content))} The row has {names}. {_remedy(job)}"
    return UserError(f"{job.where}, {job.rows.place(row)}, '{error.key}': expected {error.expected}{columns}")


def _remedy(job: EncodeJob) -> str:
    """Return the advice on how to read columns with other names."""
    kind = kind_of(job.method)
    if any(isinstance(source, GivenTable) for source in job.rows.sources):
        return "`rename_column` of the dataset changes the names of columns"
    fields = ", ".join(f"field_{name}: NAME" for name in RENAMED.get(kind, ()))
    options = ["`field_messages: NAME`"] * (kind in ("text", "ebft")) + [f"`type: {{{fields}}}`"] * bool(fields)
    return f"{' or '.join([*options, '`type: file.function`, a transform'])} reads columns of other names"


def within_limits(job: EncodeJob, row: int, record: Record) -> tuple[Record | None, str | None]:
    """Return the record after the length rules, or None if they drop it, and the reason for any change."""
    try:
        return apply_length_rules(record, job.rules, job.method)
    except RowError as error:
        raise bad_row(job, row, error) from error


def _append(columns: dict[str, list[Any]], record: dict[str, Any], names: set[str]) -> None:
    """Append a record to columns; values without a column in the schema are stored as JSON."""
    names.update(record)
    for name, values in columns.items():
        if name != OTHERS:
            values.append(record.get(name))
    if OTHERS in columns:
        columns[OTHERS].append(json.dumps({k: v for k, v in record.items() if k not in columns}, default=str))


def with_columns(stored: Dataset, names: Collection[str]) -> Dataset:
    """Return stored rows with only the columns in `names`; those stored as JSON become columns again."""
    kept = [name for name in stored.column_names if name in names or name == OTHERS]
    rows = stored.select_columns(kept)
    return rows.with_transform(partial(_unfold, sorted(set(names) - set(kept)))) if OTHERS in kept else rows


def _unfold(names: Sequence[str], columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Turn the columns that were stored as JSON back into columns; a missing value is None."""
    if OTHERS not in columns:
        return columns
    others = [json.loads(text) for text in columns[OTHERS]]
    kept = {name: values for name, values in columns.items() if name != OTHERS}
    return kept | {name: [row.get(name) for row in others] for name in names}
