"""Config and tokenizer in, prepared rows out: opened, encoded, bounded in length, split, ordered, cached."""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import transformers
from datasets import Dataset
from numpy.typing import NDArray

from upweight.config import Config, view
from upweight.config.config import general_keys
from upweight.data import cache
from upweight.data.encode import Encoder, build_encoder
from upweight.data.report import REPORT_JSON, EntryCounts, PrepareReport, measure
from upweight.data.sources.open import GivenTable, OpenedDataset, RowSelection, open_entry, selected_datasets
from upweight.data.workers import Chunk, EncodeJob, encode_all, refuse_unread, schema_of, with_columns, within_limits
from upweight.errors import UserError
from upweight.heartbeat import activity, progressed
from upweight.log import logger
from upweight.methods.base import Method
from upweight.row_rules import split_rows, training_order
from upweight.runs.checkpoints import is_whole
from upweight.types import IGNORED
from upweight.version import __version__

# Data settings that change how the work is done and not what comes out.
NOT_SHAPING = {
    "prepared_path", "skip_prepare", "processes", "in_memory", "workers", "prefetch", "drop_last", "template_timeout",
}  # fmt: skip
REPEATED_ROW = "repeats an earlier row (dataset_exact_deduplication)"


class Entry(NamedTuple):
    """One entry of `datasets` or `test_datasets`, ready to be read."""

    opened: OpenedDataset
    encoder: Encoder

    def job(self, rows: RowSelection, *, evaluation: bool = False) -> EncodeJob:
        return EncodeJob(self.opened.where, evaluation, rows, self.encoder)


@dataclass(frozen=True)
class Prepared:
    """Rows for training and for evaluation, and the report on both."""

    train: Dataset
    evaluation: Dataset | None
    report: PrepareReport
    folder: Path  # where the prepared rows are
    entries: tuple[Entry, ...]

    @property
    def template(self) -> str | None:
        """Text of the chat template that all training rows share; None if it is the tokenizer's, or they differ."""
        texts = {entry.encoder.setup.template.source for entry in self.entries if not entry.opened.evaluation}
        return texts.pop() if len(texts) == 1 else None


def prepare(config: Config, tokenizer: Any) -> Prepared:
    """Prepare a config's data, or read it from the cache if nothing that shapes it has changed."""
    entries = []
    for key, number, spec in selected_datasets(config):
        evaluation = key == "test_datasets"
        opened = open_entry(spec, f"{key}[{number}]", config.folder, evaluation=evaluation, seed=config.optim.seed)
        entries.append(_build_entry(config, tokenizer, opened, number))
    return _prepare_cached(config, tokenizer, tuple(entries), trains=True)


def prepare_given(
    config: Config, tokenizer: Any, rows: Dataset, where: str, *, trains: bool, keep: bool = True
) -> Prepared:
    """Prepare rows that a script hands over, by the config's only entry; what is not kept leaves nothing on disk."""
    (spec,) = config.data.datasets
    opened = OpenedDataset(spec, where, ({"train": [GivenTable(rows)]},), evaluation=False, seed=config.optim.seed)
    entries = (_build_entry(config, tokenizer, opened, 0),)
    if keep:
        return _prepare_cached(config, tokenizer, entries, trains=trains)
    with tempfile.TemporaryDirectory() as target:
        _write_prepared(config, entries, Path(target))
        return _read_from(entries, Path(target), in_memory=True)


def _build_entry(config: Config, tokenizer: Any, opened: OpenedDataset, number: int) -> Entry:
    of_config = (view(config), config.folder, config.model.num_labels)
    return Entry(opened, build_encoder(config.data, config.method, opened.entry, number, tokenizer, *of_config))


def _prepare_cached(config: Config, tokenizer: Any, entries: tuple[Entry, ...], *, trains: bool) -> Prepared:
    data = config.data
    folder = Path(data.prepared_path).expanduser() / cache.digest(_shaped_by(config, tokenizer, entries))
    cached = not data.skip_prepare and is_whole(folder)
    if not cached:
        if folder.exists() and not data.skip_prepare:
            logger.warning("%s: is incomplete or damaged; preparing it again", folder)
        cache.write_folder(folder, lambda target: _write_prepared(config, entries, target), replace=data.skip_prepare)
    prepared = _read_from(entries, folder, in_memory=data.in_memory, cached=cached)
    if trains:
        opened = next(entry.opened for entry in entries if not entry.opened.evaluation)
        require_both_labels(prepared.train, config.method, lambda: f"{opened.where}, {opened.rows().location(0)}")
    return prepared


def _shaped_by(config: Config, tokenizer: Any, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that the prepared rows depend on."""
    parts = [(entry.opened, entry.encoder.source_text) for entry in entries]
    shape: dict[str, Any] = {
        "code": [__version__, transformers.__version__, cache.code_digest()],
        "method": [config.method.name, config.method.data, config.method.strided],
        "classes": config.model.num_labels,
        "seed": config.optim.seed,
        "data": config.data.model_dump(mode="json", exclude=NOT_SHAPING),
        "tokenizer": cache.tokenizer_digest(tokenizer),
        "entries": [[opened.identity(), text, opened.entry.model_dump(mode="json")] for opened, text in parts],
    }
    if any(entry.encoder.transform for entry in entries):
        # A transform may act on any key that was set, but for those of outputs and of ways of working.
        keys = general_keys().items()
        unseen = {path for path, (section, _) in keys if section in ("run", "callbacks", "tracking")}
        unseen |= {path for path, (section, key) in keys if section == "data" and key.name in NOT_SHAPING}
        shape["keys"] = {path: value for path, value in config.set_keys.items() if path not in unseen}
    return shape


def _write_prepared(config: Config, entries: Sequence[Entry], target: Path) -> None:
    """Encode everything and write it to `target`, under a progress bar on stderr if that is a terminal."""
    from rich import progress
    from rich.console import Console

    started, jobs, console = time.perf_counter(), jobs_of(config, entries), Console(stderr=True)
    for job in jobs:
        refuse_unread(job)
    work = _Builder(config, jobs, target)
    columns = progress.TextColumn("preparing data"), progress.BarColumn(), progress.MofNCompleteColumn()
    times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    hidden = not console.is_terminal
    shown = progress.Progress(*columns, *times, console=console, disable=hidden, transient=True)
    with shown as bar, activity(f"preparing rows (chat_template_timeout: {config.data.template_timeout:g} s a row)"):
        task = bar.add_task("", total=sum(len(job.rows) for job in jobs))
        for chunk in encode_all(jobs, config.data.processes):
            work.add(chunk)
            bar.update(task, advance=chunk.rows)
            progressed()
    work.finish(time.perf_counter() - started)


def jobs_of(config: Config, entries: Sequence[Entry]) -> list[EncodeJob]:
    """Which rows are trained on and which are held out, entry by entry; training first."""
    train = [entry for entry in entries if not entry.opened.evaluation]
    rows = [entry.opened.rows() for entry in train]
    split = split_rows(config.data, [len(part) for part in rows], config.optim.seed)
    parts = list(zip(train, rows, split, strict=True))
    jobs = [entry.job(part.select(trained)) for entry, part, (trained, _) in parts]
    jobs += [entry.job(part.select(held), evaluation=True) for entry, part, (_, held) in parts if len(held)]
    others = [entry for entry in entries if entry.opened.evaluation]
    return jobs + [entry.job(entry.opened.rows(), evaluation=True) for entry in others]


class _Builder:
    """Takes chunks in order; writes rows at once and keeps a few numbers about each."""

    def __init__(self, config: Config, jobs: Sequence[EncodeJob], target: Path) -> None:
        self.config, self.target = config, target
        self.parts = [EntryCounts(job.where, job.evaluation, len(job.rows)) for job in jobs]
        self.column_names: set[str] = set()
        self.seen: set[bytes] = set()
        self.lengths: list[NDArray[np.int32]] = []
        self.origin: list[NDArray[np.int64]] = []
        schema = pa.schema(list(schema_of(config.method).items()))
        sides = ("train", "eval") if any(job.evaluation for job in jobs) else ("train",)
        self.writers = {side: pa.ipc.new_stream(str(target / f"{side}.arrow"), schema) for side in sides}

    def add(self, chunk: Chunk) -> None:
        """Write a chunk's rows, without those that repeat earlier ones if the config says so."""
        part, batch, origin = self.parts[chunk.job], chunk.batch, chunk.origin_N2
        part.dropped += chunk.dropped
        part.notes += chunk.notes
        self.column_names |= chunk.column_names
        if chunk.digests:
            fresh: list[bool] = []
            for digest in chunk.digests:
                fresh.append(digest not in self.seen)
                self.seen.add(digest)
            part.dropped += Counter({REPEATED_ROW: fresh.count(False)})
            batch, origin = batch.filter(pa.array(fresh)), origin[np.array(fresh)]
        part.kept += len(batch)
        self.writers["eval" if part.evaluation else "train"].write_batch(batch)
        if not part.evaluation:
            self.lengths.append(chunk.length_M3.astype(np.int32))
            self.origin.append(np.insert(origin, 0, chunk.job, axis=1))

    def finish(self, seconds: float) -> None:
        """Close the files and write the order of training and the report."""
        for writer in self.writers.values():
            writer.close()
        prompt, completion, sequence = np.concatenate([np.zeros((0, 3), np.int32), *self.lengths]).T
        data = self.config.data
        limits: dict[str, tuple[str, int | None]] = {"max_prompt_length": ("prompt", data.max_prompt_length)}
        lengths = {"prompt": prompt, "completion": completion}
        if self.config.method.data != "prompts":
            limits["sequence_len"], lengths["sequence"] = ("sequence", data.sequence_len), sequence
        report = measure(self.parts, lengths, limits)
        report.seconds = seconds
        for side, use, count in (("train", "train", report.train_rows), ("eval", "evaluate", report.eval_rows)):
            if side in self.writers and not count:
                raise UserError("\n".join([*report.lines()[:-1], f"no rows are left to {use} on."]))
        kept = [part.kept for part in self.parts if not part.evaluation]
        np.save(self.target / "order.npy", training_order(data, kept, self.config.optim.seed))
        np.save(self.target / "origin.npy", np.concatenate(self.origin))
        saved = {"report": REPORT_JSON.dump_python(report, mode="json"), "columns": sorted(self.column_names)}
        (self.target / "report.json").write_text(json.dumps(saved), encoding="utf-8")


def _read_from(entries: tuple[Entry, ...], folder: Path, *, in_memory: bool, cached: bool = False) -> Prepared:
    """What `_write_prepared` wrote to a folder."""
    saved = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    report = REPORT_JSON.validate_python({**saved["report"], "cached": cached})

    def rows(file: Path) -> Dataset:
        return with_columns(Dataset.from_file(str(file), in_memory=in_memory), saved["columns"])

    train, evaluation = rows(folder / "train.arrow").select(np.load(folder / "order.npy")), folder / "eval.arrow"
    return Prepared(train, rows(evaluation) if evaluation.exists() else None, report, folder, entries)


def require_both_labels(rows: Dataset, method: Method, first: Callable[[], str]) -> None:
    """Raise a UserError if all rows have the same label, unless the other label has weight 0; `first` names a row."""
    weights = method.label_weights
    if weights is None or not len(rows):
        return
    labels = pc.call_function("unique", [rows.with_format("arrow")["label"]]).to_pylist()
    missing = {True, False} - set(labels)
    if missing and all(weights[label] > 0 for label in missing):
        key = "kto_undesirable_weight" if labels[0] else "kto_desirable_weight"
        problem = f"it and all other rows ({len(rows)}) are labelled {str(labels[0]).lower()}; KTO compares both labels"
        remedy = f"Add rows with the other label, or set '{key}: 0' to train on one."
        raise UserError(f"{first()}, 'label': {problem}. {remedy}")


def longest_of(*prepared: Dataset | None) -> int:
    """Tokens of the longest sequence in prepared rows."""
    lengths = [0]
    for rows in [part for part in prepared if part is not None]:
        names = [name for name in rows.data.column_names if name == "ids" or name.endswith("_ids")]
        sizes = {name: pc.call_function("list_value_length", [rows.data.column(name)]).to_numpy() for name in names}
        prompt = sizes.pop("prompt_ids", np.zeros(1, np.int64))
        lengths += [int(np.nanmax(prompt + size)) for size in sizes.values() or [0]]
    return max(lengths)


def shown_rows(config: Config, prepared: Prepared, count: int, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """Yield the first training rows: rendered text, and with `tokens` the ids and the loss mask."""
    order, origin = np.load(prepared.folder / "order.npy"), np.load(prepared.folder / "origin.npy")
    jobs = jobs_of(config, prepared.entries)
    for number in range(min(count, len(prepared.train))):
        job, row, record = (int(value) for value in origin[order[number]])
        encoded = jobs[job].encoder(jobs[job].rows.take(row, row + 1)[0])[record]
        kept = within_limits(jobs[job], row, encoded)[0]
        assert kept is not None
        before, after = ({name: part.columns.get(f"{name}_ids") for name in kept.text} for part in (encoded, kept))
        decode = jobs[job].encoder.setup.tokens.tokenizer.decode
        cut = {name: decode(ids) for name, ids in after.items() if ids != before[name]}
        # Values that JSON does not support, such as dates, are shown as the text that rewards get too.
        text = json.loads(json.dumps({**kept.text, **cut}, default=str))
        yield {**text, **(_shown_tokens(prepared.train[number]) if tokens else {})}


def _shown_tokens(row: dict[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name == "ids" or name.endswith("_ids")}
    if "loss_mask" in row:
        columns["loss_mask"] = [int(mark) for mark in row["loss_mask"]]
    if "ids" in row and "labels" in row:
        columns["token_labels"] = row["labels"]
        columns["loss_mask"] = [int(mark != IGNORED) for mark in row["labels"]]
    return columns
