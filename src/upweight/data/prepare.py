"""Config and tokenizer in, prepared rows out: opened, encoded, bounded in length, split, ordered, cached."""

import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import transformers
from datasets import Dataset
from numpy.typing import NDArray

from upweight import __version__
from upweight.config import Config, view
from upweight.config.config import general_keys
from upweight.data import cache
from upweight.data.chunks import Chunk, EncodeJob, encode_all, schema_of, with_columns
from upweight.data.encode import Encoder, build_encoder
from upweight.data.label_balance import require_both_labels
from upweight.data.progress import progress
from upweight.data.report import EntryCounts, PrepareReport, measure
from upweight.data.selection import selected_datasets
from upweight.data.sources.open import DatasetEntry, GivenTable, RowSelection, open_entry
from upweight.data.unread import refuse_unread
from upweight.errors import UserError

# Data settings that change how the work is done and not what comes out.
WITHOUT_EFFECT = frozenset(
    {"prepared_path", "skip_prepare", "processes", "in_memory", "workers", "prefetch", "drop_last"}
)
REPEATED = "repeats an earlier row (dataset_exact_deduplication)"


@dataclass(frozen=True)
class Entry:
    """One entry of `datasets` or `test_datasets`, ready to be read."""

    opened: DatasetEntry
    encoder: Encoder
    evaluation: bool


@dataclass(frozen=True)
class Prepared:
    """Rows ready for training, what evaluates it, and the report on both."""

    train: Dataset
    evaluation: Dataset | None
    report: PrepareReport
    folder: Path  # where the prepared rows are
    entries: tuple[Entry, ...]

    @property
    def template(self) -> str | None:
        """Text of the chat template that all training rows share; None if it is the tokenizer's own, or they differ."""
        texts = {entry.encoder.setup.template.source for entry in self.entries if not entry.evaluation}
        return texts.pop() if len(texts) == 1 else None


def prepare(config: Config, tokenizer: Any) -> Prepared:
    """Prepare a config's data, or read it from the cache if nothing that shapes it has changed."""
    data = _cached(config, tokenizer, _open_entries(config, tokenizer))
    require_both_labels(data.train, config.method, lambda: _first_row(data.entries))
    return data


def prepare_given(
    config: Config, tokenizer: Any, rows: Dataset, where: str, *, trains: bool, keep: bool = True
) -> Prepared:
    """Prepare rows that a script hands over, by the config's only entry; what is not kept leaves nothing on disk."""
    (row,) = config.data.datasets
    opened = DatasetEntry(row, where, ({"train": [GivenTable(rows)]},), evaluation=False, seed=config.optim.seed)
    encoder = build_encoder(
        config.data, config.method, row, 0, tokenizer, view(config), config.folder, config.model.num_labels
    )
    entries = (Entry(opened, encoder, False),)
    if keep:
        data = _cached(config, tokenizer, entries)
        if trains:
            require_both_labels(data.train, config.method, lambda: _first_row(entries))
        return data
    with tempfile.TemporaryDirectory() as place:
        _build(config, entries, Path(place))
        return _read_from(config, entries, Path(place), in_memory=True)


def longest_of(*prepared: Dataset | None) -> int:
    """Tokens of the longest sequence in prepared rows."""
    lengths = [0]
    for rows in prepared:
        if rows is None:
            continue
        names = [name for name in rows.data.column_names if name == "ids" or name.endswith("_ids")]
        sizes = {name: pc.call_function("list_value_length", [rows.data.column(name)]).to_numpy() for name in names}
        prompt = sizes.pop("prompt_ids", np.zeros(1, np.int64))
        lengths += [int(np.nanmax(prompt + size)) for size in sizes.values() or [0]]
    return max(lengths)


def _cached(config: Config, tokenizer: Any, entries: tuple[Entry, ...]) -> Prepared:
    key = cache.digest(_shaped_by(config, tokenizer, entries))
    folder = Path(config.data.prepared_path).expanduser() / key
    cached = not config.data.skip_prepare and cache.find(folder)
    if not cached:
        cache.write_whole(folder, lambda place: _build(config, entries, place), replace=config.data.skip_prepare)
    return _read_from(config, entries, folder, cached=cached, in_memory=config.data.in_memory)


def _read_from(
    config: Config, entries: tuple[Entry, ...], folder: Path, *, in_memory: bool, cached: bool = False
) -> Prepared:
    """What `_build` wrote to a folder."""
    saved = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    report = dataclasses.replace(PrepareReport.from_json(saved["report"]), cached=cached)
    train = _read(folder / "train.arrow", saved["columns"], in_memory).select(np.load(folder / "order.npy"))
    held = folder / "eval.arrow"
    evaluation = _read(held, saved["columns"], in_memory) if held.exists() else None
    return Prepared(train, evaluation, report, folder, entries)


def _first_row(entries: Sequence[Entry]) -> str:
    opened = next(entry.opened for entry in entries if not entry.evaluation)
    return f"{opened.where}, {opened.rows().place(0)}"


def jobs_of(config: Config, entries: Sequence[Entry]) -> list[EncodeJob]:
    """Which rows are trained on and which are held out, entry by entry; training first."""
    rows = [entry.opened.rows() for entry in entries]
    train = [number for number, entry in enumerate(entries) if not entry.evaluation]
    _keep_shard(config, rows, train)
    held = _held_out(config, [len(rows[number]) for number in train])
    jobs, held_jobs = [], []
    for number, mask in zip(train, held, strict=True):
        jobs.append(_job(config, entries[number], rows[number].select(~mask), evaluation=False))
        if mask.any():
            held_jobs.append(_job(config, entries[number], rows[number].select(mask), evaluation=True))
    others = [
        _job(config, entry, rows[number], evaluation=True) for number, entry in enumerate(entries) if entry.evaluation
    ]
    return [*jobs, *held_jobs, *others]


def _open_entries(config: Config, tokenizer: Any) -> tuple[Entry, ...]:
    entries, seen = [], view(config)
    for key, number, row in selected_datasets(config):
        evaluation = key == "test_datasets"
        place = f"{key}[{number}]"
        opened = open_entry(row, place, config.folder, evaluation=evaluation, seed=config.optim.seed)
        encoder = build_encoder(
            config.data, config.method, row, number, tokenizer, seen, config.folder, config.model.num_labels
        )
        entries.append(Entry(opened, encoder, evaluation))
    return tuple(entries)


def _shaped_by(config: Config, tokenizer: Any, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that the prepared rows depend on."""
    shape: dict[str, Any] = {
        "code": [__version__, transformers.__version__, cache.code_digest()],
        "method": [config.method.name, config.method.data, config.method.strided],
        "classes": config.model.num_labels,
        "seed": config.optim.seed,
        "data": config.data.model_dump(mode="json", exclude=set(WITHOUT_EFFECT)),
        "tokenizer": cache.tokenizer_digest(tokenizer),
        "entries": [
            [entry.opened.identity(), entry.encoder.source_text, entry.opened.entry.model_dump(mode="json")]
            for entry in entries
        ],
    }
    if any(entry.encoder.transform for entry in entries):
        shape["keys"] = _seen_by_transforms(config)
    return shape


def _seen_by_transforms(config: Config) -> dict[str, Any]:
    """The keys that a transform may act on: all that were set, but for outputs and ways of working."""
    known = general_keys()

    def shapes(path: str) -> bool:
        section, key = known.get(path, ("method", None))
        return section not in ("run", "tracking") and not (key and section == "data" and key.name in WITHOUT_EFFECT)

    return {path: value for path, value in config.set_keys.items() if shapes(path)}


def _keep_shard(config: Config, rows: list[RowSelection], train: Sequence[int]) -> None:
    """Keep every n-th row over all training entries, as `dataset_shard_num` asks."""
    count, index, before = config.data.shard_count, config.data.shard_index, 0
    if count is None:
        return
    for number in train:
        length = len(rows[number])
        rows[number] = rows[number].select(slice((index - before) % count, None, count))
        before += length


def _held_out(config: Config, lengths: Sequence[int]) -> list[NDArray[np.bool_]]:
    """A mask over each training entry's rows: True where `val_set_size` holds the row out."""
    size, total = config.data.val_set_size, sum(lengths)
    count = min(max(round(size * total), 1), total) if 0 < size < 1 else int(size)
    if count and count >= total:
        raise UserError(f"val_set_size: {count} of {total} rows would be held out and none left to train on.")
    mask = np.zeros(total, bool)
    mask[np.random.default_rng(config.optim.seed).permutation(total)[:count]] = True
    return np.split(mask, np.cumsum(lengths)[:-1])


def _job(config: Config, entry: Entry, rows: RowSelection, *, evaluation: bool) -> EncodeJob:
    rules = config.data
    if evaluation and rules.eval_sequence_len:
        rules = rules.model_copy(update={"sequence_len": rules.eval_sequence_len})
    return EncodeJob(entry.opened.where, evaluation, rows, entry.encoder, rules, config.method)


def _build(config: Config, entries: Sequence[Entry], place: Path) -> None:
    """Encode everything and write it to `place`."""
    started = time.perf_counter()
    jobs = jobs_of(config, entries)
    for job in jobs:
        refuse_unread(job)
    work = _Builder(config, jobs, place)
    with progress("preparing data", sum(len(job.rows) for job in jobs)) as advance:
        for number, rows, chunk in encode_all(jobs, processes=config.data.processes, digests=config.data.deduplicate):
            work.add(number, chunk)
            advance(rows)
    work.finish(time.perf_counter() - started)


class _Builder:
    """Takes chunks in order; writes rows at once and keeps a few numbers about each."""

    def __init__(self, config: Config, jobs: Sequence[EncodeJob], place: Path) -> None:
        self.config, self.jobs, self.place = config, jobs, place
        self.parts = [EntryCounts(job.where, job.evaluation, len(job.rows)) for job in jobs]
        self.names: set[str] = set()
        self.seen: set[bytes] = set()
        self.lengths: list[NDArray[np.int32]] = []
        self.origin: list[NDArray[np.int64]] = []
        self.schema = pa.schema(list(schema_of(config.method).items()))
        sides = {"train": True, "eval": any(job.evaluation for job in jobs)}
        self.writers = {
            side: pa.ipc.new_stream(str(place / f"{side}.arrow"), self.schema)
            for side, wanted in sides.items()
            if wanted
        }

    def add(self, number: int, chunk: Chunk) -> None:
        """Write a chunk's rows, without those that repeat earlier ones if the config says so."""
        part, batch, origin = self.parts[number], chunk.batch, chunk.origin_N2
        part.dropped += chunk.dropped
        part.notes += chunk.notes
        self.names |= chunk.names
        if chunk.digests:
            fresh = np.array([self._is_new(digest) for digest in chunk.digests])
            part.dropped += Counter({REPEATED: int((~fresh).sum())})
            batch, origin = batch.filter(pa.array(fresh)), origin[fresh]
        part.kept += len(batch)
        self.writers["eval" if part.evaluation else "train"].write_batch(batch)
        if not part.evaluation:
            self.lengths.append(chunk.length_M3.astype(np.int32))
            self.origin.append(np.insert(origin, 0, number, axis=1))

    def finish(self, seconds: float) -> None:
        """Close the files and write the order of training and the report."""
        for writer in self.writers.values():
            writer.close()
        report = self._report(seconds)
        if not report.train_rows:
            raise UserError("\n".join([*report.lines()[:-1], "no rows are left to train on."]))
        if "eval" in self.writers and not report.eval_rows:
            raise UserError("\n".join([*report.lines()[:-1], "no rows are left to evaluate on."]))
        kept = [part.kept for part in self.parts if not part.evaluation]
        np.save(self.place / "order.npy", _order(self.config, kept))
        np.save(self.place / "origin.npy", np.concatenate(self.origin))
        saved = {"report": report.to_json(), "columns": sorted(self.names)}
        (self.place / "report.json").write_text(json.dumps(saved), encoding="utf-8")

    def _is_new(self, digest: bytes) -> bool:
        known = len(self.seen)
        self.seen.add(digest)
        return len(self.seen) > known

    def _report(self, seconds: float) -> PrepareReport:
        prompt, completion, sequence = np.concatenate([np.zeros((0, 3), np.int32), *self.lengths]).T
        data = self.config.data
        limits: dict[str, tuple[str, int | None]] = {"max_prompt_length": ("prompt", data.max_prompt_length)}
        lengths = {"prompt": prompt, "completion": completion}
        if self.config.method.data != "prompts":
            limits["sequence_len"], lengths["sequence"] = ("sequence", data.sequence_len), sequence
        return dataclasses.replace(measure(self.parts, lengths, limits), seconds=seconds)


def _order(config: Config, kept: Sequence[int]) -> NDArray[np.int64]:
    """The order in which prepared rows are trained on."""
    data, random = config.data, np.random.default_rng(config.optim.seed)
    order = np.arange(sum(kept))
    if data.shuffle_before_merging:
        order = np.concatenate([random.permutation(part) for part in np.split(order, np.cumsum(kept)[:-1])])
    return random.permutation(order) if data.shuffle_merged and not data.curriculum else order


def _read(file: Path, columns: Sequence[str], in_memory: bool) -> Dataset:
    """Prepared rows by their column names; columns that no row has are left out."""
    return with_columns(Dataset.from_file(str(file), in_memory=in_memory), columns)
