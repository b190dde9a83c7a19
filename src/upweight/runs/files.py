"""The names of what a run writes, and how; for those who read a run without the libraries that train."""

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

from upweight.runs.report.reading import JsonLines

METRICS, CONFIG, HEALTH, RECORD, REPORT = "metrics.jsonl", "config.yaml", "health.jsonl", "run.json", "report.html"
COMPLETIONS = "completions"  # a folder


def this_machine() -> str:
    """A mark of this machine that does not tell its name: a folder may be pushed to the hub."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def no_folder_at(folder: Path) -> str | None:
    """Why a run's folder cannot be made or written to, or None where it can."""
    place = folder
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        return f"{place} is a file"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written to"


def is_alive(pid: object, begun: str | None = None) -> bool:
    """Whether a process of this machine is there; where it is known when it began, whether it is the same one."""
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and another user's
        pass
    state, since = _standing(pid)
    same = since is None or begun in (None, since)
    return state != "Z" and same  # one that has ended stays until its parent asks for it


def begun_at(pid: int) -> str | None:
    """When a process began, as the system counts: its number alone may go to another, as where a container restarts."""
    return _standing(pid)[1]


def _standing(pid: int) -> tuple[str | None, str | None]:
    """A process's state and when it began, where the system has a file that says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None, None
    return fields[0], fields[19]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that a run has logged; a line that was cut off is passed over."""
    return JsonLines(folder / METRICS).read()


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
