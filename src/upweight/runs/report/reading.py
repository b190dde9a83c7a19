"""Reads files of a run folder, also while they are being written, as plain values for the page."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

POINTS = 2000  # of a series
OF_ALL = ("step", "epoch")  # in rows of training and of evaluations


def columns(rows: Iterable[Mapping[str, Any]], *, evaluation: bool) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return steps and values by metric, of training or evaluations (`eval_...`); at most `POINTS`, evenly spaced."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and any(name.startswith("eval_") == evaluation for name in row if name not in OF_ALL):
            by_step.setdefault(step, []).append(row)
    steps = evenly(sorted(by_step), POINTS)  # before values are read, because there may be very many rows
    joined = [{name: value for row in by_step[step] for name, value in row.items()} for step in steps]
    names = sorted({name for row in joined for name in row if name.startswith("eval_") == evaluation} - {"step"})
    values = {name: [number(row.get(name)) for row in joined] for name in names}
    return steps, {name: column for name, column in values.items() if any(value is not None for value in column)}


def evenly(values: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` values, evenly spaced, including the first and the last."""
    if len(values) <= count:
        return list(values)
    if count < 2:
        return list(values[len(values) - count :])
    return [values[round(number * (len(values) - 1) / (count - 1))] for number in range(count)]


def number(value: Any) -> float | None:
    """Return a finite number rounded for the page, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def plain(value: Any, longest: int) -> Any:
    """Return a JSON value for the page, with finite numbers and texts of at most `longest` characters."""
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")
        return text if len(text) <= longest else f"{text[:longest]} … ({len(text) - longest:,} more letters)"
    if isinstance(value, Mapping):
        return {plain(str(key), longest): plain(inner, longest) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, longest) for inner in value]
    return value if isinstance(value, bool) else number(value)
