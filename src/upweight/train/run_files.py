"""The names of what a run writes, and how; for those who read a run without the libraries that train."""

import hashlib
import os
import socket
from pathlib import Path

METRICS, CONFIG, HEALTH, RECORD, REPORT = "metrics.jsonl", "config.yaml", "health.jsonl", "run.json", "report.html"
COMPLETIONS = "completions"  # a folder


def this_machine() -> str:
    """A mark of this machine that does not tell its name: a folder may be pushed to the hub."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
