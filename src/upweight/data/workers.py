"""Encodes rows into Arrow batches, a few hundred rows at a time, in one process or several."""

import hashlib
import json
import multiprocessing
import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from upweight.config.sections.data import UserFormat
from upweight.data.chat_rows import empty_parts
from upweight.data.cleaning import HASHES, SAMPLED, EvaluationRows, RowShingles, signature_of
from upweight.data.columns import ROLES, mapping_advice, type_mapping
from upweight.data.encode import Encoder
from upweight.data.raw_row import NO_TEXT, Record, Row, RowError
from upweight.data.report import MOST_NAMED
from upweight.data.sources.open import GivenTable, RowSelection
from upweight.data.sources.streams import RawChunk
from upweight.data.stored_columns import column_of_records, schema_of
from upweight.errors import UserError, did_you_mean
from upweight.log import counted
from upweight.processes import end_with_parent, keep_pages_shared
from upweight.row_rules import apply_length_rules, lengths_of

CHUNK_ROWS = 512  # rows encoded together
WORTH_FORKING = 20_000  # rows below which more processes cost more than they bring
MOST_PROCESSES = 16
SEARCH_SECONDS = 2.0  # for further bad rows after the first, of which there may be millions
LEFT_OUT = "left out by the {}"
CONTAMINATED = "contains an evaluation row (dataset_contamination_check)"
ODD = {
    **{part: f"left with an empty {part}" for part in ("prompt", "answer")},
    "pair": "whose two answers are the same",
}  # what is counted of rows that are kept

# Keys of an entry that name a column.
NAMING = ("field_messages", "field_chosen", "field_rejected", "field_system", "field_tools", "field", "text_column")

TEXT_KEYS = {"completion": "field", "pretrain": "text_column"}  # that name the column of a format of raw text


@dataclass(frozen=True)
class EncodeJob:
    """The rows of one entry that are used for training or for evaluation, and how they are encoded."""

    where: str
    evaluation: bool
    rows: RowSelection | RawChunk
    encoder: Encoder
    evaluated: EvaluationRows | None = None  # which training rows should not contain

    @cached_property
    def shingles(self) -> RowShingles:
        """By which rows are compared: of the columns that the format reads."""
        row = _read_row(self)
        columns = None if row is None else row.read - {self.encoder.setup.entry.field_system}
        return RowShingles.of(self.rows.take(0, min(SAMPLED, len(self.rows))), columns)


@dataclass
class Chunk:
    """The encoded records of consecutive rows of a job."""

    job: int
    rows: int  # how many were read
    batch: pa.RecordBatch
    origin_N2: NDArray[np.int64]  # row of the job, and number among that row's records
    length_M3: NDArray[np.int64]  # prompt, completion, sequence; of every record, kept or not
    column_names: set[str]  # that any record has
    rank_N: list[float]  # values of `curriculum_column` of the records kept, where it is set
    digests: list[bytes]  # of the records kept, for deduplication
    signature_NH: NDArray[np.uint32]  # of the rows of the records kept, for near duplicates
    dropped: Counter[str]
    notes: Counter[str]
    odd: dict[str, list[int]]  # a name in `ODD` -> the rows of the job that it is counted of


def encode_all(jobs: Sequence[EncodeJob], processes: int | None) -> Iterator[Chunk]:
    """Yield the chunks of all jobs in order."""
    tasks = ((number, start) for number, job in enumerate(jobs) for start in range(0, len(job.rows), CHUNK_ROWS))
    total = sum(len(job.rows) for job in jobs)
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if total >= WORTH_FORKING else 1
    count = min(processes, -(-total // CHUNK_ROWS))
    if count <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        for task in tasks:
            yield encode_chunk(jobs, *task)
        return
    # Forked processes get the jobs without their being pickled.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), start_process, (jobs,))
    waiting: deque[Future[Chunk]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_encode_in_process, *task))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise lost_process() from error
    finally:
        pool.shutdown(cancel_futures=True)


def lost_process() -> UserError:
    """Return the error for a process that ended while it encoded rows."""
    problem = "a process that prepares data died, most likely for lack of memory"
    return UserError(f"dataset_num_proc: {problem}. Set a lower number.")


jobs_of_process: list[EncodeJob] = []


def start_process(jobs: Sequence[EncodeJob]) -> None:
    """Set up a forked process that encodes rows of these jobs."""
    # The processes already keep all cores busy; threads inside them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs_of_process.extend(jobs)
    keep_pages_shared()
    end_with_parent()


def _encode_in_process(number: int, start: int) -> Chunk:
    return encode_chunk(jobs_of_process, number, start)


def encode_chunk(jobs: Sequence[EncodeJob], job_number: int, start: int) -> Chunk:
    """Encode a chunk of a job's rows; one that cannot be used raises a UserError with its place."""
    job, kept, origin, lengths = jobs[job_number], [], [], []
    method, stop = job.encoder.setup.method, min(start + CHUNK_ROWS, len(job.rows))
    dropped, notes = Counter[str](), Counter[str]()
    rows = job.rows.take(start, stop)
    encoded = _encode_rows(job, rows, start)
    if isinstance(job.rows, RawChunk) and any("images" in one.columns for records in encoded for one in records):
        raise UserError(f"{job.where}: rows have images, which are not read from streams yet. Set `streaming: false`.")
    users = [name for name in ("filter", "transform") if getattr(job.encoder, name)]
    users += job.encoder.setup.form.leaving_out()
    if users:
        dropped += Counter({LEFT_OUT.format(" or the ".join(users)): sum(not records for records in encoded)})
    odd: dict[str, list[int]] = {}
    judged = rows if job.encoder.transform is None else ()  # a transform writes the texts that are read
    for row, content in enumerate(judged, start):
        for part in empty_parts(job.encoder.setup, Row(content)) if encoded[row - start] else ():
            notes[ODD[part]] += 1
            odd.setdefault(part, []).append(row)
    signature_RH, contaminated = _compared(job, rows)
    for row, records in enumerate(encoded, start):
        if records and row - start in contaminated:
            (dropped if job.encoder.setup.data.contamination == "drop" else notes)[CONTAMINATED] += 1
            if job.encoder.setup.data.contamination == "drop":
                continue
        for number, record in enumerate(records):
            lengths.append(lengths_of(record.columns, method))
            bounded, reason = within_limits(job, row, record)
            if reason is not None:
                (dropped if bounded is None else notes)[reason] += 1
            if bounded is not None:
                if (chosen := bounded.columns.get("chosen_ids")) and chosen == bounded.columns["rejected_ids"]:
                    notes[ODD["pair"]] += 1
                    odd.setdefault("pair", []).append(row)
                kept.append(bounded.columns)
                origin.append((row, number))
    schema = schema_of(method, images=job.encoder.setup.images is not None)
    batch = pa.record_batch(
        [pa.array(column_of_records(name, kept, schema), schema[name]) for name in schema], list(schema)
    )
    compared = kept if job.encoder.setup.data.deduplicate else []
    contents = [json.dumps(columns, sort_keys=True, default=str).encode() for columns in compared]
    digests = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
    origin_N2, length_M3 = np.array(origin, np.int64).reshape(-1, 2), np.array(lengths, np.int64).reshape(-1, 3)
    names = {name for columns in kept for name in columns}
    signature_NH = signature_RH[origin_N2[:, 0] - start] if len(signature_RH) else signature_RH
    rank = job.encoder.setup.data.curriculum_column
    ranks = [_rank(job, row, rows[row - start], rank) for row, _ in origin] if rank and not job.evaluation else []
    of_records = (batch, origin_N2, length_M3, names, ranks, digests, signature_NH)
    return Chunk(job_number, stop - start, *of_records, dropped, notes, odd)


def _rank(job: EncodeJob, number: int, row: Any, column: str) -> float:
    """Return the number in a row's `curriculum_column`."""
    try:
        value = Row(row).optional_number(column)
        if value is None:
            raise RowError(column, "a number, by which curriculum_column orders the rows")
    except RowError as error:
        raise bad_row(job, number, error, row) from error
    return value


def _compared(job: EncodeJob, rows: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.uint32], set[int]]:
    """Return a signature of each row if near duplicates are looked for, and which rows contain an evaluation row."""
    signed = job.encoder.setup.data.near_duplicates is not None and not job.evaluation
    signature_RH, contaminated = np.zeros((len(rows) if signed else 0, HASHES), np.uint32), set[int]()
    for number, row in enumerate(rows if signed or job.evaluated else ()):
        shingles = job.shingles(row)
        if signed:
            signature_RH[number] = signature_of(shingles)
        if job.evaluated and job.evaluated.any_in(shingles):
            contaminated.add(number)
    return signature_RH, contaminated


def with_evaluation_rows(jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
    """Return the jobs, those of training with the rows of the others to look for."""
    common = np.unique(np.concatenate([job.shingles.common for job in jobs]))  # training rows are compared without it
    of_rows = (
        replace(job.shingles, common=common)(row)
        for job in jobs
        if job.evaluation
        for start in range(0, len(job.rows), CHUNK_ROWS)
        for row in job.rows.take(start, min(start + CHUNK_ROWS, len(job.rows)))
    )
    evaluated = EvaluationRows.of(of_rows)
    return [job if job.evaluation else replace(job, evaluated=evaluated) for job in jobs]


def _encode_rows(job: EncodeJob, rows: Sequence[Mapping[str, Any]], start: int) -> list[list[Record]]:
    try:
        return job.encoder.encode_many(rows)
    except RowError:
        errors, until, read = dict[int, RowError](), time.monotonic() + SEARCH_SECONDS, start
        for read in range(start, len(job.rows)):  # also beyond the chunk
            try:
                job.encoder(job.rows.take(read, read + 1)[0])
            except RowError as error:
                errors[read] = error
            if time.monotonic() > until if errors else read + 1 >= start + len(rows):
                break
        if not errors:
            raise
        (first, error), *others = errors.items()
        more = _others([job.rows.location(number) for number, _ in others], read + 1)
        raise UserError(f"{bad_row(job, first, error, rows[first - start])}{more}") from error.__cause__


def _others(places: Sequence[str], read: int) -> str:
    """Return a line with the places of further bad rows among those read, and how many are bad; nothing for none."""
    many = f"{len(places) + 1:,} of the first {counted(read, 'row')} have such errors; the next ones"
    return f"\n{many}: {', '.join(places[: MOST_NAMED - 1])}" if places else ""


def bad_row(job: EncodeJob, row: int, error: RowError, content: Any) -> UserError:
    """Return the error about a row: dataset, row number, key, what was expected, and the columns of `content`."""
    columns, key = "", re.split(r"[.[]", error.key)[0]
    if isinstance(content, Mapping) and (name := _empty_cell(job, key, content)) is not None:
        remedy = _leaving_out(f"bool(row[{name!r}])")
        if _of_script(job):
            remedy = f"`filter(lambda row: row[{name!r}])` of the dataset leaves such rows out"
        columns = f". Its {name!r} is empty: {remedy}"
    elif isinstance(content, Mapping) and key == "row":
        columns = (
            f". The row has {', '.join(map(str, content))}: they are empty, or `chat_template` writes none of them"
        )
    elif isinstance(content, Mapping) and error.expected == NO_TEXT and content.get(_column_of(job, error.key)):
        columns = f". The row's {_column_of(job, error.key)!r} is not empty: `chat_template` writes nothing of it"
    elif isinstance(content, Mapping) and (name := _mapped_column(job, key)) in content:
        columns = f", read from {name!r}. Mend the row, or leave it out by `filter`"
    elif isinstance(content, Mapping) and not content and not _of_script(job):
        columns = f". The row is empty: {_leaving_out('bool(row)')}"
    elif isinstance(content, Mapping) and key not in (*content, "images") and job.encoder.transform is None:
        names = ", ".join(map(str, content)) or "no columns"
        field, column = _absent_column(job, content)
        named = f" `{field}` names {column!r}, which the row does not have." if field else ""
        near = did_you_mean(column or key, list(content))
        advice = "" if field else f" {_rename_advice(job, content)}"
        columns = f".{named}{near} The row has {names}.{advice}"
    return UserError(f"{job.where}, {job.rows.location(row)}, '{error.key}': expected {error.expected}{columns}")


def _leaving_out(condition: str) -> str:
    """Return the remedy for rows that do not fulfil a condition, written in Python."""
    keep = f"def keep(row): return {condition}"
    return f"`filter: filters.keep` in the entry leaves such rows out, with `{keep}` in filters.py"


def _empty_cell(job: EncodeJob, key: str, row: Mapping[str, Any]) -> str | None:
    """Return the column that is read for a key, if the row has it and nothing in it."""
    name = _column_of(job, key)
    value = row.get(name, False)
    is_empty = value is None or value == [] or (isinstance(value, str) and not value.strip())
    return name if is_empty and job.encoder.transform is None else None


def _column_of(job: EncodeJob, key: str) -> str:
    """Return the column that is read for a key."""
    form = job.encoder.setup.entry.type
    return (getattr(form, f"field_{key}", None) if isinstance(form, UserFormat) else None) or key


def _mapped_column(job: EncodeJob, key: str) -> str | None:
    """Return the column that a mapping reads for a key; None unless it maps all that the method reads."""
    form, roles = job.encoder.setup.entry.type, ROLES.get(job.encoder.setup.method.formats(), ())
    role = key if key in roles else {"prompt": "instruction", "completion": "output"}.get(key)
    is_whole = isinstance(form, UserFormat) and {f"field_{one}" for one in roles} <= form.model_fields_set
    return getattr(form, f"field_{role}") if is_whole and role in roles else None


def _absent_column(job: EncodeJob, row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the field of a mapping that names a column which a row does not have, and that column."""
    form, roles = job.encoder.setup.entry.type, ROLES.get(job.encoder.setup.method.formats(), ())
    if not isinstance(form, UserFormat):
        return None, None
    fields = [f"field_{role}" for role in roles if f"field_{role}" in form.model_fields_set]
    named = {name: str(getattr(form, name)) for name in fields}
    return next(
        ((name, column) for name, column in named.items() if column not in row and not Row(row).has(column)),
        (None, None),
    )


def _of_script(job: EncodeJob) -> bool:
    """Whether a script passed the rows."""
    return any(isinstance(source, GivenTable) for source in job.rows.sources)


def _rename_advice(job: EncodeJob, row: Mapping[str, Any]) -> str:
    """Return the advice on how to read columns with other names: the mapping to paste where they can be recognised."""
    kind = job.encoder.setup.method.formats()
    if _of_script(job):
        return "`rename_column` of the dataset changes the names of columns"
    if job.encoder.setup.entry.type is None and (mapping := mapping_advice(kind, row)) is not None:
        return f"Add to {job.where}: {mapping}"
    if job.encoder.setup.entry.type == "chat_template" and (mapping := type_mapping(kind, row)) is not None:
        return f"In {job.where}, in place of `type: chat_template`: `{mapping}` and `as_messages: true`"
    if (key := TEXT_KEYS.get(str(job.encoder.setup.entry.type))) is not None:
        return f"`{key}: NAME` reads a column of another name"
    fields = ", ".join(f"field_{name}: NAME" for name in ROLES.get(kind, ()))
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


class TrackedRow(Row):
    """A row that records which of its columns are read."""

    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def _read_row(job: EncodeJob) -> TrackedRow | None:
    """Return the first row once its format has read it; None if it cannot, or if a transform may read any column."""
    encoder = job.encoder
    if encoder.transform is not None or not len(job.rows):
        return None
    for number in range(min(SAMPLED, len(job.rows))):
        row = TrackedRow(job.rows.take(number, number + 1)[0])
        try:
            if encoder.read(encoder.setup, row):  # not left out by its label or winner
                return row
        except RowError:
            return None  # preparing the row raises the error with its place
    return None


def refuse_unread(job: EncodeJob) -> None:
    """Raise a UserError if an entry names a column that its first row has and its format does not read."""
    encoder, entry = job.encoder, job.encoder.setup.entry
    if (row := _read_row(job)) is None:
        return
    named = {key: getattr(entry, key) for key in NAMING}
    reader = f"'type: {entry.type}'" if entry.type else "rows without a 'type'"
    if isinstance(entry.type, UserFormat):
        named |= {f"type.{key}": getattr(entry.type, key) for key in entry.type.model_fields_set if "field_" in key}
        reader = f"a mapping of columns for {encoder.setup.method.name}"
    for key, column in named.items():
        root = column.split(".")[0] if column and column not in row else column
        if root in row and root not in row.read and row.get(root) is not None:
            if _of_script(job):
                columns = [name for name in row if name in row.read]
                problem = f"'{column}' is not read, since the rows have {' and '.join(map(repr, columns))}"
                remedy = f"Leave the argument out, or drop what is read instead: `dataset.remove_columns({columns})`."
                raise UserError(f"{job.where}: dataset_text_field: {problem}. {remedy}")
            problem = f"'{key}: {column}' has no effect: {reader} does not read that column"
            raise UserError(f"{job.where}, {job.rows.location(0)}: {problem}. Remove it, or name a type that does.")
