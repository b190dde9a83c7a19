"""The reference during training: log-probs that are precomputed and stored in the rows, or weights that are synced."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback

from upweight.data.units import units_of
from upweight.errors import UserError
from upweight.files import atomic_path
from upweight.log import counted, logger
from upweight.methods.base import Method, ReferenceSync
from upweight.models.modules import dropout_off
from upweight.models.reference import AdapterOff, SyncedReference
from upweight.train.distributed.ranks import all_gather_objects
from upweight.train.step import StepRunner

LoadModel = Callable[[], nn.Module]
ROWS_AT_A_TIME = 256
FILE = "reference.safetensors"


@dataclass(frozen=True)
class Precompute:
    """How reference log-probs are precomputed, and where they are cached."""

    no_adapter: bool = False  # compute with the adapter disabled
    folder: Path | None = None  # cache; None: in memory
    separate: LoadModel | None = None  # loads a reference model that is not the policy


@dataclass(frozen=True)
class RowsWithReference:
    """Rows of a dataset, each with its reference log-probs."""

    rows: Any
    columns: Sequence[str]
    logps: Sequence[NDArray[np.float32]] = field(repr=False)  # a notebook shows what a cell returns

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
    file = how.folder / f"reference-{_fingerprint(rows, model, runner, how)}.npz" if how.folder else None
    missing = any(all_gather_objects(file is None or not file.exists()))
    if file is None or missing:
        frozen = AdapterOff(model).use(model) if how.no_adapter and isinstance(model, PeftModel) else dropout_off(model)
        logger.info("reference log-probs: computing them for %s", counted(len(rows), "row"))
        logps: list[NDArray[np.float32]] = []
        with torch.no_grad(), frozen:
            for start in range(0, len(rows), ROWS_AT_A_TIME):
                numbers = range(start, min(start + ROWS_AT_A_TIME, len(rows)))
                units = units_of([rows[number] for number in numbers], runner.method)
                logps += [part for parts in runner.logps(model, units) for part in parts]
        if file is not None and runner.accelerator.is_main_process:
            with atomic_path(file) as partial, partial.open("wb") as out:
                np.savez(out, logps=np.concatenate(logps), ends=np.cumsum([len(part) for part in logps]))
    else:
        with np.load(file) as saved:
            logps = np.split(saved["logps"], saved["ends"][:-1])
        logger.info("reference log-probs: read from %s", file)
    return RowsWithReference(rows, _ref_columns(runner.method), logps)


def with_first_reference(rows: Any, model: nn.Module, runner: StepRunner, how: Precompute | None, step: int) -> Any:
    """Return rows that came after so many steps with log-probs of the reference; as they are where none is stored."""
    if how is None:
        return rows
    if step and not how.no_adapter and how.separate is None:
        remedy = "Give these rows as eval_dataset when the trainer is made, or leave the argument out."
        raise UserError(f"precompute_ref_log_probs: the reference is the policy as it was, now trained. {remedy}")
    return with_reference(rows, model, runner, how)


def _ref_columns(method: Method) -> tuple[str, ...]:
    sides = ("chosen", "rejected") if method.data == "pairs" else ("completion",)
    return tuple(f"ref_{side}_logps" for side in sides)


def _fingerprint(rows: Any, model: nn.Module, runner: StepRunner, how: Precompute) -> str:
    """Return a hash of what the log-probs depend on: rows, weights, precision."""
    known = hashlib.sha256(f"{len(rows)} {runner.dtype} {how.no_adapter} {_ref_columns(runner.method)}".encode())
    for number in (0, len(rows) // 2, len(rows) - 1):
        ids = {name: list(value) for name, value in sorted(rows[number].items()) if name.endswith("_ids")}
        known.update(str(ids).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        size = torch.linalg.vector_norm(values, dtype=torch.float64) if values.is_floating_point() else 0
        known.update(f"{name} {float(values.sum(dtype=torch.float64))!r} {float(size)!r}".encode())
    return known.hexdigest()[:16]


def map_sets(rows: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the rows, or to each of several named sets."""
    return {name: change(part) for name, part in rows.items()} if isinstance(rows, Mapping) else change(rows)


class SyncReference(TrainerCallback):
    """Moves the reference towards the policy every `steps` steps; must run before `KeepCheckpoints`."""

    def __init__(self, reference: SyncedReference, sync: ReferenceSync) -> None:
        self.reference, self.sync = reference, sync

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.sync.steps == 0:
            self.reference.sync(self.sync.alpha)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tensors = self.reference.state_dict()
        if state.is_world_process_zero:
            plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            safetensors.torch.save_file(plain, Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)

    def restore(self, checkpoint: Path) -> None:
        """Restore the reference from a checkpoint."""
        if not (checkpoint / FILE).is_file():
            raise UserError(f"sync_ref_model: {checkpoint} has no {FILE}: nothing was synced. Begin a new run.")
        self.reference.load_state_dict(safetensors.torch.load_file(checkpoint / FILE))
