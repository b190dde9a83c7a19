"""Files of a run folder, also while they are being written -> plain values for the page."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

POINTS = 2000  # of a series
OF_ALL = ("step", "epoch")  # in rows of training and of evaluations alike


class JsonLines:
    """Rows of a file of JSON lines; a later call reads what was added, or all of it where it was written anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.unreadable = 0
        self._read, self._file = 0, -1

    def read(self) -> list[dict[str, Any]]:
        """All rows; a last line without its end is still being written, or was cut off."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._read:
                    self._forget()
                    self._file = found.st_ino
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            self._forget()
            return self.rows
        self._read += len(whole) + len(end)
        for line in whole.splitlines():
            row = _parsed(line)
            if isinstance(row, dict):
                self.rows.append(row)
            else:
                self.unreadable += bool(line.strip())
        return self.rows


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file; empty where there is none, or none that can be read."""
    try:
        found = _parsed(path.read_bytes())
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def columns(rows: Iterable[Mapping[str, Any]], *, evaluation: bool) -> tuple[list[int], dict[str, list[float | None]]]:
    """Steps and values by metric, of training or of evaluations (`eval_...`); at most `POINTS`, evenly spaced."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and any(name.startswith("eval_") == evaluation for name in row if name not in OF_ALL):
            found.setdefault(step, []).append(row)
    steps = evenly(sorted(found), POINTS)  # before anything is read out of rows, of which there may be very many
    joined = [{name: value for row in found[step] for name, value in row.items()} for step in steps]
    names = sorted({name for row in joined for name in row if name.startswith("eval_") == evaluation} - {"step"})
    values = {name: [number(row.get(name)) for row in joined] for name in names}
    return steps, {name: column for name, column in values.items() if any(value is not None for value in column)}


def evenly(values: Sequence[Any], count: int) -> list[Any]:
    """At most `count` values, evenly spaced, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    if count < 2:
        return list(values[len(values) - count :])
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]


def number(value: Any) -> float | None:
    """A finite number with the digits that a page shows, or nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def plain(value: Any, longest: int) -> Any:
    """A value of JSON as a page can hold it: finite numbers, texts of a bounded length in whole letters."""
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")
        return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} more letters)"
    if isinstance(value, Mapping):
        return {plain(str(key), longest): plain(inner, longest) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, longest) for inner in value]
    return value if isinstance(value, bool) else number(value)
