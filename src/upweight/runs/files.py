"""The files of a run folder, read without torch, also while they are being written."""

import hashlib
import json
import os
import shlex
import socket
from itertools import islice
from pathlib import Path
from typing import Any

from upweight.errors import closest

METRICS, CONFIG, HEALTH, RECORD, REPORT = "metrics.jsonl", "config.yaml", "health.jsonl", "run.json", "report.html"
EXPERT_LOAD = "expert_load.jsonl"  # of a mixture of experts
COMPLETIONS = "completions"  # a folder
RUN_OR_MODEL = (METRICS, RECORD, "adapter_config.json", "config.json")  # files by which a folder is known as one
MOST_LOOKED_AT, MOST_LISTED = 2000, 8  # folders in which a run is looked for, names in a message


def this_machine() -> str:
    """Return a hash of the host name, because a run folder may be pushed to the hub."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def unwritable_reason(folder: Path) -> str | None:
    """Return why a run's folder cannot be created or written to, or None if it can."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written to"


def holds_run(folder: Path) -> bool:
    """Return whether a run has written into a folder, or a stage of it into one below."""
    folders = (folder, *folder.glob("stage-*"))
    return any((one / name).is_file() for one in folders for name in (METRICS, RECORD))


def no_such_run(path: Path, what: str = "run") -> str:
    """Return the message about a folder that is not there, with the names of runs and models near it."""
    above = path.parent if path.parent.is_dir() else Path()
    configs = sorted(str(one) for kind in ("*.yaml", "*.yml") for one in above.glob(kind)) if "config" in what else []
    names = [*configs, *_known_folders(above, RUN_OR_MODEL)]
    near = closest(path.name, (Path(name).name for name in names)) or closest(str(path), names)
    near = next((name for name in names if near in (name, Path(name).name)), None) if near else None
    return f"{path}: there is no such {what}.{f' Did you mean {near!r}?' if near else ''} {_listed(names)}"


def no_run_in(folder: Path) -> str:
    """Return the message about a folder that no run has written into, with the runs in it and how to check a config."""
    config = folder / CONFIG
    check = f" To check the config: `upweight doctor {shlex.quote(str(config))}`." if config.is_file() else ""
    runs = _listed(_known_folders(folder, (METRICS, RECORD)))
    return f"{folder}: neither a config nor the folder of a run, which holds {RECORD} and {METRICS}. {runs}{check}"


def _known_folders(above: Path, marks: tuple[str, ...]) -> list[str]:
    """Return the folders below one that hold a file of these names."""
    there = islice((folder for pattern in ("*", "*/*") for folder in sorted(above.glob(pattern))), MOST_LOOKED_AT)
    return [str(folder) for folder in there if any((folder / mark).is_file() for mark in marks)]


def _listed(names: list[str]) -> str:
    """Return a sentence with the names of runs, or about where runs are."""
    if not names:
        return "There is none here; a run's folder is the `output_dir` of its config."
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"Here are: {', '.join(names[:MOST_LISTED])}{more}."


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a run has logged; an incomplete last line and rows without a step are skipped."""
    return [row for row in JsonLines(folder / METRICS).read() if isinstance(row.get("step"), int)]


class JsonLines:
    """Rows of a JSON lines file; a later call reads what was added, or everything if the file was replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.unreadable = 0
        self._read, self._inode = 0, -1

    def read(self) -> list[dict[str, Any]]:
        """Return all rows; an incomplete last line is skipped."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._read:
                    self._reset()
                    self._inode = stat.st_ino
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            self._reset()
            return self.rows
        self._read += len(whole) + len(end)
        parsed = [_parse_json(line) for line in whole.splitlines() if line.strip()]
        rows = [row for row in parsed if isinstance(row, dict)]
        self.rows += rows
        self.unreadable += len(parsed) - len(rows)
        return self.rows


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is none or it cannot be read."""
    try:
        content = _parse_json(path.read_bytes())
    except OSError:
        return {}
    return content if isinstance(content, dict) else {}


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
