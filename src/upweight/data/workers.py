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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from upweight.config.sections.data import UserFormat
from upweight.data.encode import Encoder
from upweight.data.raw_row import Record, Row, RowError
from upweight.data.sources.open import GivenTable, RowSelection
from upweight.errors import UserError, did_you_mean
from upweight.methods.base import Method
from upweight.row_rules import apply_length_rules, lengths_of

CHUNK_ROWS = 512  # rows encoded together
WORTH_FORKING = 20_000  # rows below which more processes cost more than they bring
MOST_PROCESSES = 16
OTHERS = "columns as JSON"  # column that holds all further columns of a row

RENAMED = {  # columns that a `type` mapping can name, by the kind of data
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion", "label"),
    "text": ("instruction", "output"),
    "prompts": ("prompt",),
}
# Keys of an entry that name a column.
NAMING = ("field_messages", "field_chosen", "field_rejected", "field_system", "field_tools", "field")

IDS, FLAGS = pa.list_(pa.int32()), pa.list_(pa.bool_())
SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "text": {"ids": IDS, "loss_mask": FLAGS},
    "pairs": {"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS, "margin": pa.float64()},
    "labelled": {"prompt_ids": IDS, "completion_ids": IDS, "label": pa.bool_()},
    "steps": {"ids": IDS, "labels": IDS},
    "prompts": {"prompt_ids": IDS, OTHERS: pa.large_string()},
    "documents": {"ids": IDS, "loss_mask": FLAGS, "prompt_length": pa.int32()},
}


def schema_of(method: Method) -> dict[str, pa.DataType]:
    return SCHEMAS["documents" if method.strided else method.data]


@dataclass(frozen=True)
class EncodeJob:
    """The rows of one entry that are used for training or for evaluation, and how they are encoded."""

    where: str
    evaluation: bool
    rows: RowSelection
    encoder: Encoder


@dataclass
class Chunk:
    """The encoded records of consecutive rows of a job."""

    job: int
    rows: int  # how many were read
    batch: pa.RecordBatch
    origin_N2: NDArray[np.int64]  # row of the job, and number among that row's records
    length_M3: NDArray[np.int64]  # prompt, completion, sequence; of every record, kept or not
    column_names: set[str]  # that any record has
    digests: list[bytes]  # of the records kept, for deduplication
    dropped: Counter[str]
    notes: Counter[str]


def encode_all(jobs: Sequence[EncodeJob], processes: int | None) -> Iterator[Chunk]:
    """Yield the chunks of all jobs in order."""
    tasks = ((number, start) for number, job in enumerate(jobs) for start in range(0, len(job.rows), CHUNK_ROWS))
    total = sum(len(job.rows) for job in jobs)
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if total >= WORTH_FORKING else 1
    count = min(processes, -(-total // CHUNK_ROWS))
    if count <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        for task in tasks:
            yield _encode_chunk(jobs, *task)
        return
    # Forked processes get the jobs without their being pickled.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _start_process, (jobs,))
    waiting: deque[Future[Chunk]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_encode_in_process, *task))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        problem = "a process that prepares data died, most likely for lack of memory"
        raise UserError(f"dataset_num_proc: {problem}. Set a lower number.") from error
    finally:
        pool.shutdown(cancel_futures=True)


_jobs_of_process: list[EncodeJob] = []


def _start_process(jobs: Sequence[EncodeJob]) -> None:
    # The processes already keep all cores busy; threads inside them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _jobs_of_process.extend(jobs)


def _encode_in_process(number: int, start: int) -> Chunk:
    return _encode_chunk(_jobs_of_process, number, start)


def _encode_chunk(jobs: Sequence[EncodeJob], job_number: int, start: int) -> Chunk:
    """Encode a chunk of a job's rows; one that cannot be used raises a UserError with its place."""
    job, kept, origin, lengths = jobs[job_number], [], [], []
    method, stop = job.encoder.setup.method, min(start + CHUNK_ROWS, len(job.rows))
    dropped, notes = Counter[str](), Counter[str]()
    for row, records in enumerate(_encode_rows(job, start, stop), start):
        for number, record in enumerate(records):
            lengths.append(lengths_of(record.columns, method))
            bounded, reason = within_limits(job, row, record)
            if reason is not None:
                (dropped if bounded is None else notes)[reason] += 1
            if bounded is not None:
                kept.append(bounded.columns)
                origin.append((row, number))
    schema = schema_of(method)
    batch = pa.record_batch([pa.array(_column(name, kept, schema), schema[name]) for name in schema], list(schema))
    compared = kept if job.encoder.setup.data.deduplicate else []
    contents = [json.dumps(columns, sort_keys=True, default=str).encode() for columns in compared]
    digests = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
    origin_N2, length_M3 = np.array(origin, np.int64).reshape(-1, 2), np.array(lengths, np.int64).reshape(-1, 3)
    names = {name for columns in kept for name in columns}
    return Chunk(job_number, stop - start, batch, origin_N2, length_M3, names, digests, dropped, notes)


def _column(name: str, records: Sequence[dict[str, Any]], schema: Collection[str]) -> list[Any]:
    """Return the values of a column; one holds all that have no column in the schema, as JSON."""
    if name != OTHERS:
        return [record.get(name) for record in records]
    return [json.dumps({k: v for k, v in record.items() if k not in schema}, default=str) for record in records]


def _encode_rows(job: EncodeJob, start: int, stop: int) -> list[list[Record]]:
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


def bad_row(job: EncodeJob, row: int, error: RowError, content: Any) -> UserError:
    """Return the error about a row: dataset, row number, key, what was expected, and the columns of `content`."""
    columns, key = "", re.split(r"[.[]", error.key)[0]
    if isinstance(content, Mapping) and key not in content and job.encoder.transform is None:
        names = ", ".join(map(str, content)) or "no columns"
        columns = f".{did_you_mean(key, list(content))} The row has {names}. {_rename_advice(job)}"
    return UserError(f"{job.where}, {job.rows.location(row)}, '{error.key}': expected {error.expected}{columns}")


def _rename_advice(job: EncodeJob) -> str:
    """Return the advice on how to read columns with other names."""
    kind = job.encoder.setup.method.formats()
    if any(isinstance(source, GivenTable) for source in job.rows.sources):
        return "`rename_column` of the dataset changes the names of columns"
    fields = ", ".join(f"field_{name}: NAME" for name in RENAMED.get(kind, ()))
    options = ["`field_messages: NAME`"] * (kind in ("text", "ebft")) + [f"`type: {{{fields}}}`"] * bool(fields)
    return f"{' or '.join([*options, '`type: file.function`, a transform'])} reads columns of other names"


def within_limits(job: EncodeJob, row: int, record: Record) -> tuple[Record | None, str | None]:
    """Return the record after the length rules, or None if they drop it, and the reason for any change."""
    data, method, pinned = job.encoder.setup.data, job.encoder.setup.method, record.pinned
    try:
        columns, reason = apply_length_rules(record.columns, data, method, pinned=pinned, evaluation=job.evaluation)
    except UserError as error:
        raise UserError(f"{job.where}, {job.rows.location(row)}, {error}") from error
    return None if columns is None else replace(record, columns=columns), reason


def with_columns(stored: Dataset, names: Collection[str]) -> Dataset:
    """Return stored rows with only the columns in `names`; those stored as JSON become columns again."""
    kept = [name for name in stored.column_names if name in names or name == OTHERS]
    rows = stored.select_columns(kept)
    return rows.with_transform(partial(_columns_from_json, sorted(set(names) - set(kept)))) if OTHERS in kept else rows


def _columns_from_json(names: Sequence[str], columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Turn the columns that were stored as JSON back into columns; a missing value is None."""
    if OTHERS not in columns:
        return columns
    others = [json.loads(text) for text in columns[OTHERS]]
    kept = {name: values for name, values in columns.items() if name != OTHERS}
    return kept | {name: [row.get(name) for row in others] for name in names}


class TrackedRow(Row):
    """A row that records which of its columns are read."""

    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def refuse_unread(job: EncodeJob) -> None:
    """Raise a UserError if an entry names a column that its first row has and its format does not read."""
    encoder = job.encoder
    if encoder.transform is not None or not len(job.rows):  # a transform may read any column
        return
    row, entry = TrackedRow(job.rows.take(0, 1)[0]), encoder.setup.entry
    try:
        encoder.read(encoder.setup, row)
    except RowError:
        return  # preparing the row raises the error with its place
    named = {key: getattr(entry, key) for key in NAMING}
    reader = f"'type: {entry.type}'" if entry.type else "rows without a 'type'"
    if isinstance(entry.type, UserFormat):
        named |= {f"type.{key}": getattr(entry.type, key) for key in entry.type.model_fields_set if "field_" in key}
        reader = f"a mapping of columns for {encoder.setup.method.name}"
    for key, column in named.items():
        root = column.split(".")[0] if column and column not in row else column
        if root in row and root not in row.read and row.get(root) is not None:
            problem = f"'{key}: {column}' has no effect: {reader} does not read that column"
            raise UserError(f"{job.where}, {job.rows.location(0)}: {problem}. Remove it, or name a type that does.")
