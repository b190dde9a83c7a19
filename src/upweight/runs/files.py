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


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that a run has logged; a line that was cut off is passed over."""
    return JsonLines(folder / METRICS).read()
