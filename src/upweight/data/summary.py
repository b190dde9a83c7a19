"""What prepared data are like: tokens, lengths, turns by role, rows that resemble others, examples."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from upweight.config import Config
from upweight.data.cleaning import ROLE, near_duplicates, signature_of
from upweight.data.prepare import Prepared, jobs_of
from upweight.data.tokenize.messages import MessageReader
from upweight.data.workers import EncodeJob, with_evaluation_rows
from upweight.methods.base import Method
from upweight.types import IGNORED

MOST_COMPARED = 20_000  # rows that are compared with each other, evenly spaced
SHOWN_ALIKE = 5  # pairs
ALIKE = 0.8  # similarity from which rows are counted, unless the config has one


@dataclass
class Source:
    """One dataset: its rows and tokens after preparation."""

    where: str
    evaluation: bool
    read: int
    kept: int
    changes: dict[str, int]
    tokens: int = 0
    trained: int = 0
    roles: Counter[str] = field(default_factory=Counter)  # turns in the rows that were compared


@dataclass
class Comparison:
    """What comparing training rows with others showed, before any are dropped."""

    rows: int
    same: int  # rows with the words of an earlier one
    near: int  # rows that resemble an earlier one, the same ones among them
    contaminated: int | None  # rows that contain an evaluation row; None without evaluation rows
    threshold: float
    pairs: list[tuple[str, str]]  # some rows that resemble each other


@dataclass
class Summary:
    """The numbers of the page about data."""

    sources: list[Source]
    lengths: dict[str, NDArray[np.int64]]  # of training rows: prompt, completion, sequence
    comparison: Comparison


def summarize(config: Config, prepared: Prepared) -> Summary:
    """Return the numbers about a config's prepared data."""
    parts = prepared.report.parts
    changes = [{**part.dropped, **part.notes} for part in parts]
    sources = [
        Source(part.where, part.evaluation, part.read, part.kept, change)
        for part, change in zip(parts, changes, strict=True)
    ]
    length_N3, count_N2 = token_counts(prepared.train.data.table, config.method)
    order, source_N = np.load(prepared.folder / "order.npy"), prepared.entry_of_rows()
    length_N3, count_N2 = length_N3[order], count_N2[order]
    for number, source in enumerate(sources):
        source.tokens, source.trained = map(int, count_N2[source_N == number].sum(0))
    lengths = dict(zip(("prompt", "completion", "sequence"), length_N3.T, strict=True))
    lengths = {name: values for name, values in lengths.items() if values.any()}
    return Summary(sources, lengths, _compare(config, prepared, sources))


def token_counts(table: pa.Table, method: Method) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the prompt, longest completion and longest sequence of each row; its tokens, and those trained on."""
    lengths, counts = [np.zeros((0, 3), np.int64)], [np.zeros((0, 2), np.int64)]
    for batch in table.to_batches():
        sizes = {
            name: pc.call_function("list_value_length", [batch.column(name)]).to_numpy(zero_copy_only=False)
            for name in batch.schema.names
            if name.endswith("_ids")
        }
        if "input_ids" in sizes:
            marked = batch.column("loss_mask" if "loss_mask" in batch.schema.names else "labels")
            flags = marked.flatten().to_numpy(zero_copy_only=False)
            flags = flags if flags.dtype == bool else flags != IGNORED
            ends = np.cumsum(sizes["input_ids"])
            totals = np.append(0, np.cumsum(flags, dtype=np.int64))
            scored = totals[ends] - totals[ends - sizes["input_ids"]]
            lengths.append(np.stack([sizes["input_ids"] - scored, scored, sizes["input_ids"]], 1))
            counts.append(np.stack([sizes["input_ids"], scored], 1))
        else:
            prompt, answers = sizes.pop("prompt_ids"), list(sizes.values())
            longest = np.maximum.reduce([np.zeros_like(prompt), *answers])
            whole = prompt + sum(answers, np.zeros_like(prompt))
            lengths.append(np.stack([prompt, longest, prompt + longest], 1))
            counts.append(np.stack([whole, whole if method.scores_prompt else whole - prompt], 1))
    return np.concatenate(lengths).astype(np.int64), np.concatenate(counts).astype(np.int64)


def _compare(config: Config, prepared: Prepared, sources: list[Source]) -> Comparison:
    """Compare training rows with each other and with those of evaluation; count the turns of each source."""
    jobs = jobs_of(config, prepared.entries)
    evaluates = any(job.evaluation for job in jobs)
    jobs = with_evaluation_rows(jobs) if evaluates else jobs
    every = max(-(-sum(len(job.rows) for job in jobs if not job.evaluation) // MOST_COMPARED), 1)
    places, signatures, seen = [], [], Counter[bytes]()
    contaminated = 0
    for number, job in enumerate(jobs):
        for index in range(0, len(job.rows), every):
            row = job.rows.take(index, index + 1)[0]
            sources[number].roles.update(_roles(row, job.encoder.setup.reader))
            if not job.evaluation:
                shingles = job.shingles(row)
                seen[hashlib.blake2b(shingles.tobytes(), digest_size=16).digest()] += 1
                contaminated += bool(job.evaluated and job.evaluated.any_in(shingles))
                signatures.append(signature_of(shingles))
                places.append((job, index))
    threshold = config.data.near_duplicates or ALIKE
    earlier = near_duplicates(np.stack(signatures), threshold) if signatures else np.zeros(0, np.int64)
    alike = np.flatnonzero(earlier >= 0)
    pairs = [(_row_text(*places[earlier[number]]), _row_text(*places[number])) for number in alike[:SHOWN_ALIKE]]
    same = len(signatures) - len(seen)
    return Comparison(len(signatures), same, len(alike), contaminated if evaluates else None, threshold, pairs)


def _row_text(job: EncodeJob, index: int) -> str:
    row = job.rows.take(index, index + 1)[0]
    columns = job.shingles.columns
    compared = {name: value for name, value in row.items() if columns is None or name in columns}
    return f"{job.where}, {job.rows.location(index)}\n{json.dumps(compared, ensure_ascii=False, default=str)}"


def _roles(row: Mapping[str, Any], reader: MessageReader) -> Iterator[str]:
    """Yield the role of every turn in a row."""
    for value in row.values():
        for turn in value if isinstance(value, list | tuple) else [value]:
            role = next(filter(None, map(turn.get, ROLE)), None) if isinstance(turn, Mapping) else None
            if isinstance(role, str):
                yield reader.roles.get(role, role)


@dataclass(frozen=True)
class Example:
    """A training row with its dataset, as stretches of text: each with its column and whether it is trained on."""

    where: str
    stretches: list[tuple[str, str, bool]]


def examples(prepared: Prepared, count: int) -> Iterator[Example]:
    """Yield training rows of every dataset, evenly spaced in each."""
    parts = [part.where for part in prepared.report.parts]
    source_N = prepared.entry_of_rows()
    present = np.unique(source_N).tolist()
    for source in present:
        rows = np.flatnonzero(source_N == source)
        each = -(-count // len(present))
        for place in sorted({number * len(rows) // each for number in range(each)}):
            yield Example(parts[source], _stretches(prepared, int(rows[place])))


def _stretches(prepared: Prepared, number: int) -> list[tuple[str, str, bool]]:
    decode, row = prepared.entries[0].encoder.setup.tokens.tokenizer.decode, prepared.train[number]
    if "input_ids" in row and "prompt_ids" not in row:
        marks = row["loss_mask"] if "loss_mask" in row else [label != IGNORED for label in row["labels"]]
        cuts = [0, *(at for at in range(1, len(marks)) if marks[at] != marks[at - 1]), len(marks)]
        return [("", decode(row["input_ids"][a:b]), bool(marks[a])) for a, b in pairwise(cuts)]
    names = [name for name in row if name.endswith("_ids") and row[name] and isinstance(row[name][0], int)]
    return [(name[: -len("_ids")], decode(row[name]), name != "prompt_ids") for name in names]
