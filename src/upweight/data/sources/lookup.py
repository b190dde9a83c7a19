"""Where the files of a dataset entry are looked for, and whether a path can be on the hub. Imports nothing heavy."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from upweight.config.sections.data import DatasetSpec
from upweight.errors import did_you_mean

FILE_KINDS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
ALIASES = {"jsonl": "json", "txt": "text"}
PACKED = (".gz", ".bz2", ".xz", ".zst")  # endings of compressed files
NEAR = 0.76  # names of files whose endings are equal are alike by that alone


def lookup_paths(path: str, folder: Path) -> list[Path]:
    """Return where a path is looked for: from the working directory, then from the config's folder."""
    expanded = Path(os.path.expanduser(path))
    return [expanded, folder / expanded]


def existing(path: str | None, folder: Path) -> Path | None:
    """Return the file or folder at a path, if there is one."""
    return next((place for place in lookup_paths(path, folder) if place.exists()), None) if path else None


def paths_tried(path: str, folder: Path) -> str:
    """Return the places where a path is looked for, for messages."""
    return " and ".join(dict.fromkeys(str(candidate.absolute()) for candidate in lookup_paths(path, folder)))


def similar_to(path: str, folder: Path) -> str:
    """Return the question whether a file of a similar name is meant."""
    parents = [candidate.parent for candidate in lookup_paths(path, folder) if candidate.parent.is_dir()]
    return did_you_mean(Path(path).name, {file.name for parent in parents for file in parent.iterdir()}, NEAR)


def file_suffix(file: Path) -> str:
    """Return the ending that tells the kind of a file, without that of its compression."""
    return (Path(file.stem) if file.suffix.lower() in PACKED else file).suffix.lower()


def patterns_of(entry: DatasetSpec) -> list[str]:
    """Return the files and patterns that `data_files` names."""
    return [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files or []


def is_builder(entry: DatasetSpec) -> bool:
    """Return whether `path` names the kind of `data_files`, as `path: json`."""
    return bool(entry.data_files) and entry.path in (*FILE_KINDS.values(), *ALIASES)


def entry_name(entry: DatasetSpec, key: str) -> str:
    """Return an entry for messages: its key, with its path or its first files."""
    files = patterns_of(entry)
    return f"{key} ({entry.path or ', '.join([*files[:2], *(['...'] if len(files) > 2 else [])])})"


def cannot_be_on_hub(path: str) -> bool:
    """Return whether a path has a form that no dataset on the hub has."""
    by_form = path.startswith((".", "/", "~")) or path.count("/") > 1 or not re.fullmatch(r"[\w./-]+", path)
    return by_form or file_suffix(Path(path)) in FILE_KINDS


def _is_mistyped(path: str, folder: Path) -> bool:
    """Return whether a path that might be on the hub, without an owner but with an ending, is like a file beside it."""
    return "/" not in path and bool(Path(path).suffix) and bool(similar_to(path, folder))


def missing_path(path: str, folder: Path) -> str:
    """Return the message about a local path at which there is nothing."""
    return f"there is no such file or folder. Tried {paths_tried(path, folder)}.{similar_to(path, folder)}"


def matches(pattern: str, inside: Path | None, folder: Path) -> tuple[list[str], str]:
    """Return the files that match a pattern, sorted, and the places that were tried."""
    candidates = [inside / os.path.expanduser(pattern)] if inside else lookup_paths(pattern, folder)
    files = next(filter(None, (sorted(glob.glob(str(path), recursive=True)) for path in candidates)), [])
    return files, str(candidates[0]) if inside else paths_tried(pattern, folder)


def no_match(pattern: str, tried: str) -> str:
    """Return the message about a pattern that no file matches."""
    return f"data_files: no file matches {pattern!r}. Tried {tried}."


def missing_files(entry: DatasetSpec, folder: Path) -> Iterator[str]:
    """Yield what an entry names and this machine does not have; what may be on the hub is not judged."""
    path = entry.path
    if path and "://" in path:
        return
    local = existing(path, folder)
    if path is None or is_builder(entry) or (local and local.is_dir()):
        for pattern in patterns_of(entry):
            files, tried = matches(pattern, local, folder) if "://" not in pattern else ([pattern], "")
            if not files:
                yield no_match(pattern, tried)
    elif local is None and glob.has_magic(path):
        files, tried = matches(path, None, folder)
        if not files:
            yield no_match(path, tried)
    elif local is None and (cannot_be_on_hub(path) or _is_mistyped(path, folder)):
        yield missing_path(path, folder)
