"""Metrics between two logs, reduced over ranks, and the files that logs are written to."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from upweight.files import write_text
from upweight.runs.files import METRICS, metrics_of
from upweight.train.distributed.ranks import union_over_ranks
from upweight.train.recording.completions import cut_completions
from upweight.types import Extreme, Metrics

SIDES = {"rewards/chosen", "rewards/rejected"}


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which metrics are summed on a device; Apple's has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def loss_without_steps(logs: Mapping[str, float], state: TrainerState, resumed_at: int) -> dict[str, float]:
    """Return the mean loss that was logged before, for a resume that trained no step; NaN where none was."""
    if "train_loss" not in logs or state.global_step > resumed_at:
        return {}
    total, counted = 0.0, 0
    for entry in state.log_history:
        if "loss" in entry:
            total, counted = total + entry["loss"] * (entry["step"] - counted), entry["step"]
    return {"train_loss": total / counted if counted else math.nan}


class Meters:
    """Metrics between two logs: sums and extremes on the device, reduced over ranks once per log."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, int], Tensor] = {}  # by name and the sign of an extreme, or 0 for a mean

    def add(self, metrics: Metrics) -> None:
        """Add a batch's metrics without a device sync, and in few launches: those of one dtype together."""
        alike: dict[Any, list[tuple[tuple[str, int], Tensor, Tensor]]] = {}
        for name, metric in metrics.items():
            extreme = isinstance(metric, Extreme)
            first, second = (metric.value, metric.value) if extreme else (metric.total, metric.weight)
            kind = torch.promote_types(first.dtype, second.dtype)
            alike.setdefault((kind, first.device), []).append(((name, metric.sign if extreme else 0), first, second))
        for entries in alike.values():
            numbers = [number for _, first, second in entries for number in (first, second)]
            table = torch.stack(numbers).detach().to(sum_dtype(numbers[0].device)).view(-1, 2)
            self._merge([key for key, _, _ in entries], table)

    def _merge(self, keys: list[tuple[str, int]], table: Tensor) -> None:
        """Add a row of sums, or the larger of both extremes, to what each key has."""
        known = [(number, key) for number, key in enumerate(keys) if key in self._pairs]
        for extreme in (False, True):
            if chosen := [(number, key) for number, key in known if bool(key[1]) == extreme]:
                before = torch.stack([self._pairs[key] for _, key in chosen])
                now = table if len(chosen) == len(keys) else torch.stack([table[number] for number, _ in chosen])
                joined = torch.maximum(before, now) if extreme else before + now
                self._pairs |= dict(zip([key for _, key in chosen], joined.unbind(), strict=True))
        new = {key: table[number] for number, key in enumerate(keys) if key not in self._pairs}
        self._pairs |= new

    def drain(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the means and extremes over all ranks since the last call; what has no value is left out."""
        keys, pairs, self._pairs = union_over_ranks(set(self._pairs)), self._pairs, {}
        if not keys:
            return {}
        nothing = torch.zeros(2, dtype=sum_dtype(accelerator.device), device=accelerator.device)
        rows = [pairs.get((name, sign), nothing - math.inf if sign else nothing) for name, sign in keys]
        table = accelerator.gather(torch.stack(rows)[None])
        assert isinstance(table, Tensor)
        means = zip(keys, table.sum(0).tolist(), strict=True)
        extremes = zip(keys, table.amax(0).tolist(), strict=True)
        drained = {name: total / weight for (name, sign), (total, weight) in means if not sign and weight}
        if drained.keys() >= SIDES:  # of answers that are not in pairs, whose means can be compared all the same
            drained.setdefault("rewards/margins", drained["rewards/chosen"] - drained["rewards/rejected"])
        return drained | {name: sign * value for (name, sign), (value, _) in extremes if sign and value > -math.inf}


def cut_metrics(folder: Path, step: int) -> None:
    """Delete the metrics after `step` and an incomplete last line."""
    if (folder / METRICS).exists():
        kept = [row for row in metrics_of(folder) if row.get("step", 0) <= step]
        write_text(folder / METRICS, "".join(json.dumps(row) + "\n" for row in kept))


class MetricsFile(TrainerCallback):
    """Appends one flat JSON object for each log; a training first deletes what was written after its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            cut_metrics(self.folder, state.global_step or -1)
            cut_completions(self.folder, state.global_step or -1)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (line := _json_line(kwargs["logs"], state)) is not None:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


class MetricsOut(TrainerCallback):
    """Prints the same JSON to standard output, for other programs."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (line := _json_line(kwargs["logs"], state)) is not None:
            print(line, flush=True)


def _json_line(logs: Mapping[str, Any], state: Any) -> str | None:
    """Return a log as JSON, which has no NaN and infinity; None on other ranks and for the Trainer's final summary."""
    if not state.is_world_process_zero or "train_runtime" in logs:
        return None
    odd = {name: str(value) for name, value in logs.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({"step": state.global_step, **logs, **odd})
