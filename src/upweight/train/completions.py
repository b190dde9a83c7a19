"""What the policy wrote, for people: a file for each rollout, a few samples on the terminal."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from upweight.rollout.store import Rollout, readable
from upweight.train.checkpoints import write_text

FOLDER = "completions"
LONGEST_SHOWN = 600  # characters of one cell


class CompletionFiles:
    """Writes each rollout to `completions/step_NNNNN.jsonl`, named after the first step that trains on it."""

    def __init__(self, run_folder: Path, names: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.folder, self.names, self.decode = run_folder / FOLDER, names, decode

    def __call__(self, rollout: Rollout, step: int) -> None:
        self._write(rollout, step, "step")

    def of_evaluation(self, rollout: Rollout, step: int, name: str) -> None:
        """Write what an evaluation after `step` steps saw to `completions/<name>_step_NNNNN.jsonl`."""
        self._write(rollout, step, f"{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}_step")

    def _write(self, rollout: Rollout, step: int, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, **row} for row in readable(rollout, self.names, self.decode)]
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_text(self.folder / f"{name}_{step:05d}.jsonl", text)


class ShownCompletions:
    """Prints a few completions with their rewards every so many steps."""

    def __init__(self, every: int, count: int, names: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.every, self.count, self.names, self.decode = max(every, 1), count, names, decode
        self.console = Console(stderr=True)
        self._shown = -1

    def __call__(self, rollout: Rollout, step: int) -> None:
        if self._shown >= 0 and step - self._shown < self.every:
            return
        self._shown = step
        table = Table(title=f"step {step}", show_lines=True)
        for column in ("prompt", "completion", *self.names, "advantage"):
            table.add_column(column, overflow="fold")
        rows = list(readable(rollout, self.names, self.decode))
        spread = max(len(rows) // self.count, 1)
        for row in rows[::spread][: self.count]:
            rewards = [_number(row["rewards"][name]) for name in self.names]
            table.add_row(_text(row["prompt"]), _text(row["completion"]), *rewards, _number(row["advantage"]))
        self.console.print(table, markup=False)


def cut_completions(run_folder: Path, step: int) -> None:
    """Drop files of rollouts and evaluations after `step`."""
    for file in (run_folder / FOLDER).glob("*step_*.jsonl"):
        match = re.fullmatch(r"(?:.+_)?step_(\d+)\.jsonl", file.name)
        if match and int(match[1]) > step:
            file.unlink()


def _text(value: Any) -> str:
    """A prompt or completion as a person reads it: the last message of a conversation."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    shown = str(value)
    return shown if len(shown) <= LONGEST_SHOWN else shown[:LONGEST_SHOWN] + " ..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
