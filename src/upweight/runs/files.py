"""The file names of a run folder, readable without importing torch."""

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

from upweight.runs.json_files import JsonLines

METRICS, CONFIG, HEALTH, RECORD, REPORT = "metrics.jsonl", "config.yaml", "health.jsonl", "run.json", "report.html"
COMPLETIONS = "completions"  # a folder


def this_machine() -> str:
    """Return a hash of the host name, because a run folder may be pushed to the hub."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def unwritable_reason(folder: Path) -> str | None:
    """Return why a run's folder cannot be created or written to, or None if it can."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written to"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a run has logged; an incomplete last line and rows without a step are skipped."""
    return [row for row in JsonLines(folder / METRICS).read() if isinstance(row.get("step"), int)]
