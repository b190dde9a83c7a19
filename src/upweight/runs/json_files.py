"""Reads JSON files of a run folder, also while they are being written."""

import json
import os
from pathlib import Path
from typing import Any


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
        except FileNotFoundError:
            self._reset()
            return self.rows
        self._read += len(whole) + len(end)
        parsed = [_parsed(line) for line in whole.splitlines() if line.strip()]
        rows = [row for row in parsed if isinstance(row, dict)]
        self.rows += rows
        self.unreadable += len(parsed) - len(rows)
        return self.rows


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if there is none or it cannot be read."""
    try:
        content = _parsed(path.read_bytes())
    except OSError:
        return {}
    return content if isinstance(content, dict) else {}


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
