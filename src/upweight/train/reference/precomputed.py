"""Reference log-probs that are computed once before training and stored in the rows."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn

from upweight.data.units import units_of
from upweight.files import atomic_path
from upweight.log import logger
from upweight.methods.base import Method
from upweight.models.modules import dropout_off
from upweight.models.reference import AdapterOff
from upweight.train.distributed.ranks import MaxOverRanks
from upweight.train.step import StepRunner

ROWS_AT_A_TIME = 256


@dataclass(frozen=True)
class Precompute:
    """How reference log-probs are precomputed, and where they are cached."""

    base_model: bool = False  # compute with the adapter disabled
    folder: Path | None = None  # cache; None: in memory
    separate: Callable[[], nn.Module] | None = None  # loads a reference model that is not the policy


class RowsWithReference:
    """Rows of a dataset, each with its reference log-probs."""

    def __init__(self, rows: Any, columns: Sequence[str], logps: Sequence[NDArray[np.float32]]) -> None:
        self.rows, self.columns, self.logps = rows, columns, logps

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        width = len(self.columns)
        logps = self.logps[number * width : (number + 1) * width]
        return {**self.rows[number], **dict(zip(self.columns, logps, strict=True))}


def with_reference(rows: Any, model: nn.Module, runner: StepRunner, how: Precompute) -> Any:
    """Return the rows with log-probs of the current policy or a separate model, from the cache if they are there."""
    if rows is None:
        return None
    if how.separate is not None:
        model = how.separate()
    columns = _columns(runner.method)
    file = how.folder / f"reference-{_fingerprint(rows, model, runner, how)}.npz" if how.folder else None
    missing = MaxOverRanks()(int(file is None or not file.exists()))
    if file is None or missing:
        with torch.no_grad(), _reference_weights(model, how):
            logps = _compute(rows, model, runner)
        if file is not None and runner.accelerator.is_main_process:
            _write(file, logps)
    else:
        with np.load(file) as saved:
            logps = np.split(saved["logps"], saved["ends"][:-1])
        logger.info("reference log-probs: read from %s", file)
    return RowsWithReference(rows, columns, logps)


def _columns(method: Method) -> tuple[str, ...]:
    sides = ("chosen", "rejected") if method.data == "pairs" else ("completion",)
    return tuple(f"ref_{side}_logps" for side in sides)


def _reference_weights(model: nn.Module, how: Precompute) -> Any:
    if how.base_model and isinstance(model, PeftModel):
        return AdapterOff(model).use(model)
    return dropout_off(model)


def _compute(rows: Any, model: nn.Module, runner: StepRunner) -> list[NDArray[np.float32]]:
    """Return the log-probs of every sample of every row, in order, on every rank."""
    logger.info("reference log-probs: computing them for %d rows", len(rows))
    logps: list[NDArray[np.float32]] = []
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        numbers = range(start, min(start + ROWS_AT_A_TIME, len(rows)))
        units = units_of([rows[number] for number in numbers], runner.method)
        logps += [part for parts in runner.logps(model, units) for part in parts]
    return logps


def _fingerprint(rows: Any, model: nn.Module, runner: StepRunner, how: Precompute) -> str:
    """Return a hash of what the log-probs depend on: rows, weights, precision."""
    known = hashlib.sha256(f"{len(rows)} {runner.dtype} {how.base_model} {_columns(runner.method)}".encode())
    for number in (0, len(rows) // 2, len(rows) - 1):
        known.update(str(_ids(rows[number])).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        size = torch.linalg.vector_norm(values, dtype=torch.float64) if values.is_floating_point() else 0
        known.update(f"{name} {float(values.sum(dtype=torch.float64))!r} {float(size)!r}".encode())
    return known.hexdigest()[:16]


def _ids(row: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value) for name, value in sorted(row.items()) if name.endswith("_ids")}


def _write(file: Path, logps: Sequence[NDArray[np.float32]]) -> None:
    with atomic_path(file) as partial, partial.open("wb") as out:
        np.savez(out, logps=np.concatenate(logps), ends=np.cumsum([len(part) for part in logps]))
