"""Builds the feed of a config's streams and mixtures, or of the datasets that a script passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from upweight.config import Config
from upweight.config.rules.feeds import keeps_count
from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.data.prepare import NOT_SHAPING, Entry, Prepared, build_entry, template_of
from upweight.data.report import PrepareReport
from upweight.data.sources.open import OpenedDataset, Source, open_entry, selected_datasets
from upweight.data.sources.streams import IterableStream, RawChunk
from upweight.data.stream.ahead import EncodePool
from upweight.data.stream.feed import RowFeed, rows_of_epoch
from upweight.data.stream.source import PreparedSource, RowSource, StreamSource, Window, stored
from upweight.log import counted

NOTHING = RawChunk(None, "rows", 0, [])


@dataclass(frozen=True)
class Fed:
    """The feed of training rows, and the chat template that all of them share."""

    feed: RowFeed
    template: str | None


def is_fed(data: DataSection) -> bool:
    """Whether training rows come from a feed: some are streamed, or they are interleaved."""
    return data.mix != "concatenate" or any(entry.streaming for entry in data.datasets)


def build_feed(config: Config, tokenizer: Any, prepared: Prepared | None) -> Fed:
    """Return the feed of a config; `prepared` are its rows that are not streamed, None where all are."""
    data, pool = config.data, EncodePool(config.data.processes)
    held_out, seed = int(data.val_set_size), None if data.curriculum else config.order_seed
    sources: list[RowSource] = []
    specs: list[DatasetSpec] = []
    entries = list(prepared.entries if prepared else ())
    for key, number, spec in selected_datasets(config):
        if key == "test_datasets":
            continue
        specs.append(spec)
        if spec.streaming:
            entries.append(_entry(config, tokenizer, key, number, spec))
            window = Window(spec.skip + held_out, _end(spec))
            sources.append(_stream(config, entries[-1], pool, seed, window))
        else:
            assert prepared is not None, "entries that are not streamed were prepared"
            sources.append(_prepared_source(config, prepared, sources, seed))
    feed = _feed(config, sources, specs, [_name(spec) for spec in specs], pool)
    return Fed(feed, template_of(entries))


def streamed_evaluation(config: Config, tokenizer: Any) -> Dataset | None:
    """Return the evaluation rows that are read from streams: `test_datasets`, or the first rows of training data."""
    pool, held_out, sources = EncodePool(config.data.processes), int(config.data.val_set_size), list[StreamSource]()
    for key, number, spec in selected_datasets(config):
        tests = key == "test_datasets"
        if spec.streaming and (tests or held_out):
            entry = _entry(config, tokenizer, key, number, spec)
            window = Window(spec.skip, _end(spec) if tests else spec.skip + held_out)
            sources.append(_stream(config, entry, pool, None, window, evaluation=True))
    try:
        return stored(sources) if sources else None
    finally:
        pool.close()


def script_feed(config: Config, parts: Mapping[str, Prepared | StreamSource], pool: EncodePool) -> RowFeed:
    """Return the feed of the datasets that a script passes, by their names."""
    seed = None if config.data.curriculum or config.data.curriculum_column else config.order_seed
    sources: list[RowSource] = []
    for number, (name, part) in enumerate(parts.items()):
        sources.append(PreparedSource(number, name, part.train, seed=seed) if isinstance(part, Prepared) else part)
    return _feed(config, sources, config.data.datasets, list(parts), pool)


def script_stream(
    config: Config, tokenizer: Any, rows: IterableDataset, where: str, pool: EncodePool, *, trains: bool
) -> StreamSource:
    """Return the source of a stream that a script passes; the config's only entry says how its rows are read."""
    (spec,) = config.data.datasets
    sources: dict[str, list[Source]] = {"train": [IterableStream(rows)]}
    opened = OpenedDataset(spec, where, (sources,), evaluation=False, seed=config.optim.seed)
    seed = config.order_seed if trains and not config.data.curriculum else None
    return _stream(config, build_entry(config, tokenizer, opened, 0), pool, seed, Window(), evaluation=not trains)


def _entry(config: Config, tokenizer: Any, key: str, number: int, spec: DatasetSpec) -> Entry:
    """Return an entry that is streamed, ready to be read."""
    evaluation = key == "test_datasets"
    opened = open_entry(spec, f"{key}[{number}]", config.folder, evaluation=evaluation, seed=config.optim.seed)
    return build_entry(config, tokenizer, opened, number)


def _stream(
    config: Config, entry: Entry, pool: EncodePool, seed: int | None, window: Window, *, evaluation: bool = False
) -> StreamSource:
    job, counted = entry.job(NOTHING, evaluation=evaluation), keeps_count(config.method, entry.opened.entry)
    options: dict[str, Any] = {"buffer": config.data.buffer_size, "seed": seed, "window": window, "counted": counted}
    return StreamSource(job, entry.opened.streams(), pool, **options)


def _prepared_source(
    config: Config, prepared: Prepared, before: Sequence[RowSource], seed: int | None
) -> PreparedSource:
    """Return the source of the next entry that is not streamed; `before` are the sources of earlier entries."""
    part = sum(isinstance(source, PreparedSource) for source in before)
    rows = prepared.train.select(np.flatnonzero(prepared.entry_of_rows() == part))
    seed = None if config.data.curriculum_column else seed
    return PreparedSource(len(before), prepared.entries[part].opened.where, rows, seed=seed)


def _feed(
    config: Config, sources: Sequence[RowSource], specs: Sequence[DatasetSpec], names: Sequence[str], pool: EncodePool
) -> RowFeed:
    data = config.data
    schedule = [(entry.step, entry.weights) for entry in data.mix_schedule]
    schedule = schedule or [(0, [spec.weight or 1.0 for spec in specs])]
    unique = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)]
    shape = data.model_dump(mode="json", exclude=NOT_SHAPING)
    return RowFeed(sources, unique, data.mix, schedule, pool, [config.optim.seed, shape])


def mixture_lines(config: Config, report: PrepareReport) -> list[str]:
    """Return the lines of a report on a mixture: the share of each dataset, and its passes in an epoch."""
    data = config.data
    if data.mix == "concatenate":
        return []
    specs = [spec for key, _, spec in selected_datasets(config) if key != "test_datasets"]
    parts = [part for part in report.parts if not part.evaluation]
    counts = [None if spec.streaming else part.kept for spec, part in zip(specs, parts, strict=True)]
    schedule = [(entry.step, entry.weights) for entry in data.mix_schedule] or [(0, [s.weight or 1.0 for s in specs])]
    shares = [[weight / sum(weights) for weight in weights] for _, weights in schedule]
    epoch = rows_of_epoch(data.mix, counts, shares)
    lines = [] if epoch is None else [f"{data.mix}: an epoch has {counted(epoch, 'row')}"]
    for number, part in enumerate(parts):
        given = ", ".join(
            f"{row[number]:.1%} from step {step}" for (step, _), row in zip(schedule, shares, strict=True)
        )
        given = given if len(shares) > 1 else f"{shares[0][number]:.1%} of the rows"
        count = counts[number]
        once = data.mix == "interleave_once"
        passes = "" if not epoch or not count or once else f", {epoch * shares[0][number] / count:.2f} passes"
        lines.append(f"{part.where}: {given}{passes}")
    return lines


def _end(spec: DatasetSpec) -> int | None:
    """Return the number of rows after which `max_samples` ends a stream."""
    return None if spec.max_samples is None else spec.skip + spec.max_samples


def _name(spec: DatasetSpec) -> str:
    """Return a short name for metrics: the last part of the path, and the configuration on the hub."""
    files = [spec.data_files] if isinstance(spec.data_files, str) else spec.data_files or ["data"]
    name = Path(spec.path or files[0]).name.split(".")[0]
    return f"{name}:{spec.name}" if isinstance(spec.name, str) else name
