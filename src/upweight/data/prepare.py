"""Config and tokenizer in, prepared rows out: opened, encoded, bounded in length, split, ordered, cached."""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
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
from upweight.data.chat_rows import has_plain_prompts, tell_of_plain_prompts
from upweight.data.cleaning import Signatures, TrainedPrompts
from upweight.data.encode import Encoder, build_encoder
from upweight.data.raw_row import Record
from upweight.data.report import (
    REPORT_JSON,
    EntryCounts,
    PrepareReport,
    measure,
    require_differing_pairs,
    warn_of_odd_rows,
)
from upweight.data.sources.open import GivenTable, OpenedDataset, RowSelection, open_entry, selected_datasets
from upweight.data.sources.streams import RawChunk
from upweight.data.stored_columns import schema_of, with_columns
from upweight.data.workers import (
    ODD,
    Chunk,
    EncodeJob,
    encode_all,
    refuse_unread,
    with_evaluation_rows,
    within_limits,
)
from upweight.errors import UserError
from upweight.heartbeat import activity, progressed
from upweight.log import logger
from upweight.methods.base import Method
from upweight.models.processor import image_reader
from upweight.row_rules import split_rows, training_order
from upweight.runs.checkpoints import is_whole
from upweight.types import IGNORED
from upweight.version import __version__

# Data settings that change how the work is done and not what comes out.
NOT_SHAPING = {
    "prepared_path", "skip_prepare", "processes", "in_memory", "workers", "prefetch", "drop_last", "template_timeout",
}  # fmt: skip
MIXING = {"streaming", "buffer_size", "mix", "mix_schedule"}  # which choose the order of prepared rows alone
PREVIEWED_ROWS = 1000  # of a stream, for reports
MIXING_OF_ENTRY = {"streaming", "weight"}
REPEATED_ROW = "repeats an earlier row (dataset_exact_deduplication)"
NEAR_DUPLICATE = "resembles an earlier row (dataset_near_deduplication)"


class Entry(NamedTuple):
    """One entry of `datasets` or `test_datasets`, ready to be read."""

    opened: OpenedDataset
    encoder: Encoder

    def job(self, rows: RowSelection | RawChunk, *, evaluation: bool = False) -> EncodeJob:
        """Return how rows of the entry are encoded, for training or evaluation."""
        encoder, rules = self.encoder, self.encoder.setup.data
        if evaluation and rules.eval_sequence_len:
            rules = rules.model_copy(update={"sequence_len": rules.eval_sequence_len})
            encoder = Encoder(replace(encoder.setup, data=rules), encoder.transform, encoder.filter)
        return EncodeJob(self.opened.where, evaluation, rows, encoder)


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
        return template_of(self.entries)

    def entry_of_rows(self) -> NDArray[np.int64]:
        """Return the number of each training row's entry, among the training entries."""
        return np.load(self.folder / "origin.npy")[np.load(self.folder / "order.npy"), 0]


def template_of(entries: Sequence[Entry]) -> str | None:
    """Return the text of the chat template that all training rows share; None if it is the tokenizer's, or differs."""
    texts = {entry.encoder.setup.template.source for entry in entries if not entry.opened.evaluation}
    return texts.pop() if len(texts) == 1 else None


def prepare(config: Config, tokenizer: Any) -> Prepared | None:
    """Prepare a config's data, or read it from the cache if nothing that shapes it changed; None: all is streamed."""
    entries = _entries(config, tokenizer, None)
    _tell_of_plain_prompts(entries)
    trains = any(not entry.opened.evaluation for entry in entries)
    return _prepare_cached(config, tokenizer, entries, trains=trains) if entries else None


def preview(config: Config, tokenizer: Any) -> Prepared:
    """Prepare a config's data for a report on it: of streams, the first rows."""
    held_out = int(config.data.val_set_size)
    entries = _entries(config, tokenizer, PREVIEWED_ROWS + held_out)
    _tell_of_plain_prompts(entries)
    return _prepare_cached(config, tokenizer, entries, trains=all(not row.streaming for row in config.data.datasets))


def _entries(config: Config, tokenizer: Any, first: int | None) -> tuple[Entry, ...]:
    """Open the entries of a config; of streams the first rows, or with None no stream."""
    entries: list[Entry] = []
    for key, number, spec in selected_datasets(config):
        if spec.streaming and first is None:
            continue
        evaluation = key == "test_datasets"
        opened = open_entry(spec, f"{key}[{number}]", config.folder, evaluation=evaluation, seed=config.optim.seed)
        opened = opened.first_rows(first) if spec.streaming and first is not None else opened
        entries.append(build_entry(config, tokenizer, opened, number))
    return tuple(entries)


def _tell_of_plain_prompts(entries: Sequence[Entry]) -> None:
    places: dict[bool, list[str]] = {True: [], False: []}  # by whether the entry chose plain text
    for entry in entries:
        rows, setup = entry.opened.rows(), entry.encoder.setup
        if entry.encoder.transform is None and len(rows) and has_plain_prompts(setup, rows.take(0, 1)[0]):
            places[setup.entry.as_messages is False].append(entry.opened.where)
    tell_of_plain_prompts(places[False], places[True])


def prepare_given(
    config: Config, tokenizer: Any, rows: Dataset, where: str, *, trains: bool, keep: bool = True
) -> Prepared:
    """Prepare rows that a script hands over, by the config's only entry; what is not kept leaves nothing on disk."""
    (spec,) = config.data.datasets
    opened = OpenedDataset(spec, where, ({"train": [GivenTable(rows)]},), evaluation=False, seed=config.optim.seed)
    entries = (build_entry(config, tokenizer, opened, 0),)
    if keep:
        return _prepare_cached(config, tokenizer, entries, trains=trains)
    with tempfile.TemporaryDirectory() as target:
        _write_prepared(config, entries, Path(target))
        return _read_from(entries, Path(target), in_memory=True)


def build_entry(config: Config, tokenizer: Any, opened: OpenedDataset, number: int) -> Entry:
    """Return an entry with the encoder of its rows."""
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
        require_differing_pairs(prepared.report, prepared.train, ODD["pair"])
        opened = next(entry.opened for entry in entries if not entry.opened.evaluation)
        require_both_labels(prepared.train, config.method, lambda: f"{opened.where}, {opened.rows().location(0)}")
    warn_of_odd_rows(prepared.report, ODD)
    return prepared


def _shaped_by(config: Config, tokenizer: Any, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that the prepared rows depend on."""
    parts = [(entry.opened, entry.encoder.source_text) for entry in entries]
    shape: dict[str, Any] = {
        "code": [__version__, transformers.__version__, cache.code_digest()],
        "method": [config.method.name, config.method.data, config.method.strided],
        "teacher": [config.method.teacher_sees, config.method.teacher_writes, config.method.demonstration_share > 0],
        "classes": config.model.num_labels,
        "seed": config.optim.seed,
        "data": config.data.model_dump(mode="json", exclude={*NOT_SHAPING, *MIXING, "datasets", "test_datasets"}),
        "tokenizer": cache.tokenizer_digest(tokenizer),
        **({} if (reader := image_reader(tokenizer)) is None else {"images": [reader.settings, reader.placeholder]}),
        "entries": [
            [opened.identity(), text, opened.evaluation, opened.entry.model_dump(mode="json", exclude=MIXING_OF_ENTRY)]
            for opened, text in parts
        ],
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
    if config.data.contamination:
        jobs = with_evaluation_rows(jobs)
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
        self.config, self.jobs, self.target = config, jobs, target
        self.parts = [EntryCounts(job.where, job.evaluation, len(job.rows)) for job in jobs]
        self.column_names: set[str] = set()
        self.seen: set[bytes] = set()
        self.prompts = TrainedPrompts(wanted=any(job.evaluation for job in jobs))
        self.lengths: list[NDArray[np.int32]] = []
        self.origin: list[NDArray[np.int64]] = []
        self.ranks: list[float] = []  # of the training rows, by `curriculum_column`
        self.signatures = Signatures(target / "signatures") if config.data.near_duplicates else None
        images = any(job.encoder.setup.images is not None for job in jobs)
        schema = pa.schema(list(schema_of(config.method, images=images).items()))
        sides = ("train", "eval") if any(job.evaluation for job in jobs) else ("train",)
        self.writers = {side: pa.ipc.new_stream(str(target / f"{side}.arrow"), schema) for side in sides}

    def add(self, chunk: Chunk) -> None:
        """Write a chunk's rows, without those that repeat earlier ones if the config says so."""
        part, batch, origin, signatures = self.parts[chunk.job], chunk.batch, chunk.origin_N2, chunk.signature_NH
        rank = chunk.rank_N
        part.dropped += chunk.dropped
        part.notes += chunk.notes
        for name, rows in chunk.odd.items():
            part.name_odd(name, map(self.jobs[chunk.job].rows.location, rows))
        self.column_names |= chunk.column_names
        if chunk.digests:
            fresh: list[bool] = []
            for digest in chunk.digests:
                fresh.append(digest not in self.seen)
                self.seen.add(digest)
            part.dropped += Counter({REPEATED_ROW: fresh.count(False)})
            mask = np.array(fresh, bool)
            batch, origin, signatures = batch.filter(pa.array(fresh)), origin[mask], signatures[mask[: len(signatures)]]
            rank = list(compress(rank, fresh))
        part.kept += len(batch)
        part.notes += self.prompts.shared(batch, evaluation=part.evaluation)
        self.writers["eval" if part.evaluation else "train"].write_batch(batch)
        if not part.evaluation:
            self.lengths.append(chunk.length_M3.astype(np.int32))
            self.origin.append(np.insert(origin, 0, chunk.job, axis=1))
            self.ranks += rank
            if self.signatures:
                self.signatures.add(signatures)

    def finish(self, seconds: float) -> None:
        """Close the files and write the order of training and the report."""
        for writer in self.writers.values():
            writer.close()
        order = self._ordered()
        prompt, completion, sequence = np.concatenate([np.zeros((0, 3), np.int32), *self.lengths]).T
        data = self.config.data
        limits: dict[str, tuple[str, int | None]] = {}
        if "prompt_ids" in self.column_names:  # a prompt that is part of one text, as in sft, is not cut alone
            limits["max_prompt_length"] = "prompt", data.max_prompt_length
        lengths = {"prompt": prompt, "completion": completion}
        if self.config.method.data != "prompts":
            limits["sequence_len"], lengths["sequence"] = ("sequence", data.sequence_len), sequence
        report = measure(self.parts, lengths, limits)
        report.seconds = seconds
        for evaluation, use, count in ((False, "train", report.train_rows), (True, "evaluate", report.eval_rows)):
            if not count and any(part.evaluation == evaluation for part in self.parts):
                raise UserError("\n".join([*report.lines()[:-1], report.nothing_left(use)]))
        np.save(self.target / "order.npy", order)
        np.save(self.target / "origin.npy", np.concatenate([np.zeros((0, 3), np.int64), *self.origin]))
        saved = {"report": REPORT_JSON.dump_python(report, mode="json"), "columns": sorted(self.column_names)}
        (self.target / "report.json").write_text(json.dumps(saved), encoding="utf-8")

    def _ordered(self) -> NDArray[np.int64]:
        """The order of training, without near duplicates, which count as dropped."""
        parts = [part for part in self.parts if not part.evaluation]
        order = training_order(self.config.data, [part.kept for part in parts], self.config.order_seed)
        if self.signatures and self.config.data.near_duplicates:
            repeated = self.signatures.repeated(self.config.data.near_duplicates)
            for part, of_part in zip(
                parts, np.split(repeated, np.cumsum([part.kept for part in parts])[:-1]), strict=True
            ):
                part.kept -= (count := int(of_part.sum()))
                part.dropped += Counter({NEAR_DUPLICATE: count})
            order = order[~repeated[order]]
        if not self.ranks:
            return order
        order = np.sort(order)
        return order[np.argsort(np.array(self.ranks)[order], kind="stable")]


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
        names = [name for name in rows.data.column_names if name.endswith("_ids")]
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
        text = json.loads(json.dumps({**kept.text, **cut}, default=str)) or _decoded(kept, decode)
        yield {**text, **(_shown_tokens(prepared.train[number]) if tokens else {})}


def _decoded(record: Record, decode: Callable[[list[int]], str]) -> dict[str, str]:
    """Return the texts of token ids, for records that keep none: rows of ids, pieces of a text."""
    columns = {name: ids for name, ids in record.columns.items() if name.endswith("_ids")}
    return {"text" if name == "input_ids" else name.removesuffix("_ids"): decode(ids) for name, ids in columns.items()}


def _shown_tokens(row: dict[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name.endswith("_ids")}
    if "loss_mask" in row:
        columns["loss_mask"] = [int(mark) for mark in row["loss_mask"]]
    if "input_ids" in row and "labels" in row:
        columns["token_labels"] = row["labels"]
        columns["loss_mask"] = [int(mark != IGNORED) for mark in row["labels"]]
    return columns
