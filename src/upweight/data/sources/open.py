"""The dataset entries of a config, with those of NeMo Gym: opened from hub, files and folders, selected by split."""

import csv
import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
from datasets.exceptions import DatasetsError
from numpy.typing import NDArray

from upweight.config import Config
from upweight.config.sections.data import DatasetSpec
from upweight.config.sections.rollout import GymDataset
from upweight.data.cache import rows_digest
from upweight.data.columns import csv_rows, surplus_cells
from upweight.data.images.row_images import undecoded
from upweight.data.sources.lookup import (
    ALIASES,
    FILE_KINDS,
    cannot_be_on_hub,
    entry_name,
    existing,
    file_suffix,
    is_builder,
    lookup_paths,
    matches,
    missing_path,
    no_match,
    paths_tried,
    patterns_of,
    similar_to,
)
from upweight.data.sources.raw_files import COMPRESSED, explained_encoding, workbook_problem
from upweight.data.sources.streams import READERS, FileStream, IterableStream, RowStream, StreamStart
from upweight.data.sources.text_files import LineFile
from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.log import logger, warn_once
from upweight.models.hub import is_offline, why_offline
from upweight.row_rules import select_from_entry

ROWS_PER_DIGEST = 1000  # rows at a time
# Errors of loading that the user can fix.
LOADING_ERRORS = (OSError, ValueError, RuntimeError, DatasetsError, csv.Error)


class Table:
    """The rows of a dataset of the `datasets` library."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        self.dataset = undecoded(dataset)

    def identity(self) -> list[Any]:
        """Return what identifies this content in the cache key: its files and the number of rows."""
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files] + [len(self.dataset)]

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: NDArray[np.int64]) -> list[dict[str, Any]]:
        first, last = int(indices[0]), int(indices[-1])
        contiguous = last - first == len(indices) - 1 and bool((np.diff(indices) == 1).all())
        columns = self.dataset[first : last + 1] if contiguous else self.dataset[indices.tolist()]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def location(self, index: int) -> str:
        """Return the number of a row, counted from 0, for messages."""
        return f"row {index}"


class GivenTable(Table):
    """The rows of a dataset that a script hands over, which may lie in memory alone and are known by their content."""

    def identity(self) -> list[Any]:
        """A digest of all rows: fingerprints of the library differ for equal rows, and can be random."""
        if self.dataset.format["type"] is None:
            return [rows_digest(self.dataset), str(self.dataset.features), len(self.dataset)]
        content = hashlib.sha256()
        for part in self.dataset.iter(ROWS_PER_DIGEST):  # rows are what a function of the script makes of them
            content.update(json.dumps(part, sort_keys=True, default=str).encode())
        return [content.hexdigest(), len(self.dataset)]


RowTable = LineFile | Table | StreamStart  # rows by their number
Source = RowTable | RowStream


@dataclass(frozen=True)
class RowSelection:
    """Rows selected from sources, in order."""

    sources: tuple[RowTable, ...]
    source_R: NDArray[np.int32]
    index_R: NDArray[np.int64]

    @staticmethod
    def of(source: RowTable) -> "RowSelection":
        """Return all rows of a source."""
        return RowSelection((source,), np.zeros(len(source), np.int32), np.arange(len(source)))

    @staticmethod
    def join(parts: Sequence["RowSelection"]) -> "RowSelection":
        before = np.cumsum([0, *(len(part.sources) for part in parts)])
        sources = tuple(source for part in parts for source in part.sources)
        source_R = np.concatenate([part.source_R + shift for part, shift in zip(parts, before, strict=False)])
        return RowSelection(sources, source_R.astype(np.int32), np.concatenate([part.index_R for part in parts]))

    def __len__(self) -> int:
        return len(self.index_R)

    def select(self, selected: Any) -> "RowSelection":
        """Return the rows that a slice, a mask or an array of positions selects."""
        return RowSelection(self.sources, self.source_R[selected], self.index_R[selected])

    def take(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the rows from `start` up to `stop`."""
        source, index = self.source_R[start:stop], self.index_R[start:stop]
        cuts = [0, *(np.flatnonzero(np.diff(source)) + 1), len(index)]
        return [row for a, b in pairwise(cuts) if b > a for row in self.sources[source[a]].take(index[a:b])]

    def location(self, row: int) -> str:
        """Return where a row comes from: its number from 0, or `row 16 (file:17)` if it has a line."""
        return self.sources[self.source_R[row]].location(int(self.index_R[row]))


@dataclass(frozen=True)
class OpenedDataset:
    """One entry of `datasets` whose sources are located but not yet read."""

    entry: DatasetSpec
    where: str  # `datasets[0] (path)`, for messages
    parts: tuple[dict[str, list[Source]], ...]  # one for each `name`: split -> sources
    evaluation: bool
    seed: int = 0  # of `max_samples`

    def identity(self) -> list[Any]:
        """Return what identifies the content of this entry in the cache key."""
        splits = [split for part in self.parts for split in part.items()]
        return [[name, [source.identity() for source in sources]] for name, sources in splits]

    def rows(self) -> RowSelection:
        """Return the rows of the entry's split, `skip`, shard and `max_samples`."""
        rows = RowSelection.join([self._select_split(part) for part in self.parts])
        if not len(rows):
            raise UserError(f"{self.where}: has no rows.")
        return rows.select(select_from_entry(self.entry, len(rows), self.seed, self.where))

    def streams(self) -> list[RowStream]:
        """Return the streams of the entry's split, in order."""
        chosen: list[RowStream] = []
        for part in self.parts:
            split = self._split(part)
            if split not in part:
                remedy = f"There is {', '.join(map(repr, part))}; slices need an entry without 'streaming'."
                raise UserError(f"{self.where}: split {split!r} cannot be streamed. {remedy}")
            chosen += [source for source in part[split] if isinstance(source, RowStream)]
        return chosen

    def first_rows(self, count: int) -> "OpenedDataset":
        """Return the entry of a stream with its first rows in its place."""
        starts: list[Source] = [StreamStart(stream, count) for stream in self.streams()]
        entry = self.entry.model_copy(update={"split": None, "max_samples": None})
        return OpenedDataset(entry, f"{self.where}, first rows", ({"train": starts},), self.evaluation, self.seed)

    def _split(self, part: dict[str, list[Source]]) -> str:
        preferred = ("test", "validation", "eval", "train") if self.evaluation else ("train",)
        split = self.entry.split or next((name for name in preferred if name in part), None)
        if split is None and len(part) > 1:
            raise UserError(f"{self.where}: has the splits {', '.join(part)}. Choose one with 'split'.")
        return split or next(iter(part))

    def _select_split(self, part: dict[str, list[Source]]) -> RowSelection:
        split = self._split(part)
        whole = {
            name: RowSelection.join([RowSelection.of(one) for one in sources if not isinstance(one, RowStream)])
            for name, sources in part.items()
        }
        try:
            ranges = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(r) for name, r in whole.items()})
        except (ValueError, AssertionError) as error:
            splits = f"There {'is' if len(part) == 1 else 'are'} {', '.join(map(repr, part))}"
            remedy = f"{splits}; slices are written 'train[:10%]' or 'train[5:50]'."
            raise UserError(f"{self.where}: split {split!r} cannot be selected. {remedy}") from error
        return RowSelection.join([whole[r.splitname].select(slice(r.from_, r.to)) for r in ranges])


def selected_datasets(config: Config) -> Iterator[tuple[str, int, DatasetSpec]]:
    """Yield every entry with its key and index; a file that is also a Gym dataset is read once, as the Gym's."""
    gym = [_gym_entry(config, dataset) for dataset in config.gym.datasets] if config.gym.enabled else []
    files = {file for row in gym if (file := _existing_file(row.path, config.folder))}
    data = config.data
    for key, rows in (("datasets", data.datasets), ("nemo_gym_datasets", gym), ("test_datasets", data.test_datasets)):
        for number, row in enumerate(rows):
            if key == "datasets" and _existing_file(row.path, config.folder) in files:
                logger.info("datasets[%d] (%s): is listed in nemo_gym_datasets too; it is read once", number, row.path)
            else:
                yield key, number, row


def _gym_entry(config: Config, dataset: GymDataset) -> DatasetSpec:
    """Return an entry of `nemo_gym_datasets` as an entry of `datasets`."""
    path, root = Path(os.path.expanduser(dataset.path)), Path(os.path.expanduser(config.gym.folder))
    # The Gym's folder is a clone of its repository or a virtual environment with it installed.
    parents = (root, *root.glob("lib/python3*/site-packages"), Path())
    candidates = [str(parent / path) for parent in parents]
    file = next((name for name in candidates if _existing_file(name, config.folder)), candidates[0])
    return DatasetSpec(path=file, type="nemo_gym", server_name=dataset.server_name, max_samples=dataset.max_samples)


def _existing_file(path: str | None, folder: Path) -> Path | None:
    return next((candidate.resolve() for candidate in lookup_paths(path or "", folder) if candidate.is_file()), None)


def open_entry(entry: DatasetSpec, key: str, folder: Path, *, evaluation: bool = False, seed: int = 0) -> OpenedDataset:
    """Locate the sources of an entry; the error names the places that were tried."""
    where = entry_name(entry, key)
    names = entry.name if isinstance(entry.name, list) else [entry.name]
    if entry.trust_remote_code:
        warn_once(f"{where}: trust_remote_code has no effect: the datasets library runs no code from repositories")
    quiet = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if quiet:
        datasets.disable_progress_bars()
    limit = "" if existing(entry.path, folder) else " (hub_timeout)"
    try:
        with activity(f"opening {where}{limit}"):
            parts = tuple(_open_sources(entry, name, where, folder) for name in names)
    except UserError:  # which is a ValueError
        raise
    except LOADING_ERRORS as error:
        remedy = ""
        if "Error tokenizing data" in _root_reason(error):
            remedy = ". Put cells that hold the separator into double quotes, and write a quote in them twice"
        raise UserError(f"{where}: cannot be loaded: {_root_reason(error)}{remedy}") from error
    finally:
        if quiet:
            datasets.enable_progress_bars()
    return OpenedDataset(entry, where, parts, evaluation, seed)


def _open_sources(entry: DatasetSpec, name: str | None, where: str, folder: Path) -> dict[str, list[Source]]:
    """Return the sources of one entry (and one of its names), by split."""
    path, kind, streaming = entry.path, ALIASES.get(entry.ds_type or "", entry.ds_type), bool(entry.streaming)
    if path and "://" in path:
        file_kind = kind or FILE_KINDS.get(file_suffix(Path(path)), "json")
        return _load_tables(file_kind, data_files=path, streaming=streaming)
    local = existing(path, folder)
    if path and local is None and is_builder(entry):
        path, kind = None, ALIASES.get(path, path)
    if path is None or (local and local.is_dir() and entry.data_files):
        return _sources(_matching_files(entry, where, local, folder), kind, streaming)
    if local and local.is_file():
        return _sources([local], kind, streaming)
    if local:
        return _open_folder(local, name, kind, streaming)
    if glob.has_magic(path):
        pattern = entry.model_copy(update={"data_files": path})
        return _sources(_matching_files(pattern, where, None, folder), kind, streaming)
    if cannot_be_on_hub(path):
        raise UserError(f"{where}: {missing_path(path, folder)}")
    offline = ""
    if is_offline():
        fetched = f"`hf download {path} --repo-type dataset --local-dir FOLDER`"
        offline = (
            f" The hub is not asked ({why_offline()}). Get the dataset where there is a network ({fetched}), bring the "
            "folder, and name it with `path`."
        )
    try:
        options = {"name": name, "revision": entry.revision, "data_files": entry.data_files}
        return _load_tables(path, **options, streaming=streaming)
    except LOADING_ERRORS as error:
        tried = paths_tried(path, folder)
        problem = f"is no file or folder (tried {tried}), and it cannot be loaded from the hub: {_root_reason(error)}."
        raise UserError(f"{where}: {problem}{offline}{similar_to(path, folder)}") from error


def _sources(files: list[Path], kind: str | None, streaming: bool = False) -> dict[str, list[Source]]:
    """Open files that together make the split `train`."""
    for problem in filter(None, map(workbook_problem, files)):
        raise UserError(f"{problem}, and name that file.")
    if streaming:
        return {"train": [FileStream(files, [kind or FILE_KINDS.get(file_suffix(file), "json") for file in files])]}
    sources: list[Source] = []
    for file in files:
        file_kind = kind or FILE_KINDS.get(file_suffix(file), "json")
        if file_kind in ("json", "text"):
            sources.append(LineFile(file, "json" if file_kind == "json" else "text"))
        else:
            if file_kind == "parquet" and not pyarrow.parquet.read_metadata(file).num_rows:
                raise UserError(f"{file}: has no rows.")
            with explained_encoding(file):
                sources += _load_tables(file_kind, data_files=str(file), **_csv_options(file_kind, file))["train"]
    return {"train": sources}


def _open_folder(folder: Path, name: str | None, kind: str | None, streaming: bool) -> dict[str, list[Source]]:
    """Open a folder that `datasets` saved, or one of files whose names contain their split."""
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        saved = datasets.load_from_disk(str(folder))
        if not streaming:
            return _by_split(saved)
        parts = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        return {str(split): [_saved_files(part)] for split, part in parts.items()}
    options: dict[str, Any] = {"path": kind, "data_dir": str(folder)} if kind else {"path": str(folder), "name": name}
    builder = datasets.load_dataset_builder(**options)
    file_kind, files = builder.name or "", builder.config.data_files or {}
    if kind is None:
        _warn_of_unread(folder, file_kind)
    if streaming and file_kind not in READERS:
        return _by_split(builder.as_streaming_dataset())
    if not streaming and file_kind not in ("json", "text", "csv"):
        builder.download_and_prepare()
        return _by_split(builder.as_dataset())
    return {
        str(split): _sources([Path(file) for file in paths], file_kind, streaming)["train"]
        for split, paths in files.items()
    }


def _warn_of_unread(folder: Path, kind: str) -> None:
    """Warn of data files in a folder that are not read, since files of another type are more."""
    shown = [file for file in sorted(folder.rglob("[!._]*")) if not file.name.startswith("dataset_info")]
    unread = [file.name for file in shown if FILE_KINDS.get(file_suffix(file), kind) != kind and file.is_file()]
    if unread and kind in READERS:
        named = ", ".join([*unread[:3], *(["..."] if len(unread) > 3 else [])])
        warn_once(f"{folder}: is read as {kind} files; not read: {named}. 'path: {folder}/*' reads all files")


def _saved_files(saved: datasets.Dataset) -> RowStream:
    """Return the files of a dataset that was saved whole, else its rows in their order."""
    if saved._indices is None:
        files = [Path(file["filename"]) for file in saved.cache_files]
        return FileStream(files, ["arrow"] * len(files))
    return IterableStream(saved.to_iterable_dataset())


def _load_tables(path: str, **options: Any) -> dict[str, list[Source]]:
    return _by_split(datasets.load_dataset(path, **options))


def _by_split(loaded: Any) -> dict[str, list[Source]]:
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    return {str(split): [_source(dataset)] for split, dataset in splits.items()}


def _source(dataset: Any) -> Source:
    return IterableStream(dataset) if isinstance(dataset, datasets.IterableDataset) else Table(dataset)


def _csv_options(kind: str, file: Path) -> dict[str, Any]:
    """Return the options for reading a CSV: every cell is read as text."""
    if kind != "csv":
        return {}
    opener = COMPRESSED.get(file.suffix.lower(), open)
    with opener(file, "rt", encoding="utf-8-sig", newline="") as content:
        rows = csv_rows(file, content)
        header, separator = list(rows.fieldnames or ()), rows.reader.dialect.delimiter
        first = next((row for row in rows if any(str(cell).strip() for cell in row.values() if cell)), None)
    if not header:
        raise UserError(f"{file}: is empty. A CSV begins with a line of column names.")
    if first is None:
        raise UserError(f"{file}: has no rows.")
    if (problem := surplus_cells(first)) is not None:  # which pandas would read shifted, the first cells as an index
        raise UserError(f"{file}:{rows.line_num}: {problem}.")
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise UserError(f"{file}:1: the column {repeated[0]!r} appears twice.")
    text = datasets.Features({name: datasets.Value("string") for name in header})
    return {"sep": separator, "na_filter": False, "features": text, "encoding": "utf-8-sig"}


def _matching_files(entry: DatasetSpec, where: str, inside: Path | None, folder: Path) -> list[Path]:
    """Return the files that `data_files` names, with patterns expanded."""
    files: list[Path] = []
    for pattern in patterns_of(entry):
        there, tried = matches(pattern, inside, folder)
        files += [Path(match) for match in there if Path(match).is_file()]
        if not there:
            raise UserError(f"{where}: {no_match(pattern, tried)}")
    return files


def _root_reason(error: BaseException) -> str:
    """Return the first line of the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
