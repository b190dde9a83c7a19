"""Completions for people to read: one file per rollout, and a few samples on the terminal."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from upweight.files import write_text
from upweight.log import clear_status
from upweight.rollout.rollout import Rollout, readable
from upweight.runs.files import COMPLETIONS
from upweight.types import Completion

LONGEST_SHOWN = 600  # characters of one cell
NARROWEST_TEXT, LONGEST_VALUE = 16, 12  # characters of the columns of text, and of a logged value beside its name
TOKENS_WRITTEN = 8192  # tokens of one file that are written one by one, which takes several times the space of text
BROKEN = "\ufffd"  # decoded from a token that holds part of a character


@dataclass
class CompletionFiles:
    """Writes each rollout to `completions/step_NNNNN.jsonl`, named after the first step that trains on it."""

    run_folder: Path
    names: Sequence[str]
    decode: Callable[[list[int]], str]
    # For each completion, the policy's log-probs of its sampled tokens before training on them, or None.
    policy_logps: Callable[[], Sequence[Sequence[float] | None]] = tuple
    known: dict[int, str] = field(default_factory=dict)  # texts of tokens

    def __call__(self, rollout: Rollout, step: int, evaluation: str | None = None) -> None:
        """Write a rollout, or that of an evaluation after `step` steps to `<its name>_step_NNNNN.jsonl`."""
        prefix = "" if evaluation is None else re.sub(r"[^0-9A-Za-z_.-]", "_", evaluation) + "_"
        policy_logps = self.policy_logps() if evaluation is None else ()
        folder = self.run_folder / COMPLETIONS
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"step": step, **row} for row in readable(rollout, self.names, self.decode)]
        tokens_left = TOKENS_WRITTEN
        for index, one in enumerate(one for group in rollout.groups for one in group.completions):
            if len(one.ids) <= tokens_left:
                tokens_left -= len(one.ids)
                logps = policy_logps[index] if index < len(policy_logps) else None
                rows[index] |= self._token_fields(one, logps)
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        write_text(folder / f"{prefix}step_{step:05d}.jsonl", text)

    def _token_fields(self, one: Completion, policy_logps: Sequence[float] | None) -> dict[str, Any]:
        """Return per-token fields of a completion: texts, sampler and policy log-probs, and which were sampled."""
        texts = token_texts(one.ids, self.decode, self.known)
        fields: dict[str, Any] = {"token_texts": texts}
        if len(one.logps) == len(one.ids):
            fields["sampler_logps"] = [round(logp, 4) for logp in one.logps]
        wrote = one.sampled or [True] * len(one.ids)
        if policy_logps is not None and len(policy_logps) == sum(wrote):
            values = iter(policy_logps)
            fields["policy_logps"] = [round(next(values), 4) if sampled else None for sampled in wrote]
        if one.advantages:
            fields["token_advantages"] = [round(value, 4) for value in one.advantages]
        if one.sampled is not None:
            fields["sampled"] = one.sampled
        return fields


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str], known: dict[int, str]) -> list[str]:
    """Return the text of each token; a character of several tokens is put with the first of them."""
    for token in set(ids) - known.keys():  # behind another token, since some tokenizers drop a leading space
        known[token] = decode([token, token])[len(decode([token])) :]
    texts = [known[token] for token in ids]
    for is_broken, numbers in groupby(range(len(ids)), lambda number: BROKEN in texts[number]):
        first, *others = numbers
        if is_broken and others:
            texts[first : others[-1] + 1] = [decode(list(ids[first : others[-1] + 1])), *[""] * len(others)]
    return texts


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
        clear_status()
        rows = list(readable(rollout, self.names, self.decode))
        spread = max(len(rows) // self.count, 1)
        logged = list(dict.fromkeys(name for group in rollout.groups for name in group.extras))  # by `log_extra`
        table = self._table(rows[::spread][: self.count], logged)
        table.title = f"step {step}"
        self.console.print(table, markup=False)

    def _table(self, rows: Sequence[Mapping[str, Any]], logged: Sequence[str]) -> Table:
        """Return the rows with a column for each number, or with one column for all where headings have no room."""
        table, names = Table(show_lines=True), [*self.names, "advantage", *logged]
        narrow = sum(len(name) + 3 for name in names) + 2 * (NARROWEST_TEXT + 3) + 1 > self.console.width
        for column in ("prompt", "completion"):
            table.add_column(column, overflow="fold", min_width=NARROWEST_TEXT)
        for column in ["rewards"] if narrow else names:
            table.add_column(column, overflow="fold", no_wrap=narrow or column not in logged, min_width=len(column))
        for row in rows:
            values = [*(row["rewards"][name] for name in self.names), row["advantage"]]
            cells = [*map(_number, values), *(_cell(row.get(name), narrow=narrow) for name in logged)]
            if narrow:
                cells = ["\n".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True))]
            table.add_row(_text(row["prompt"]), _text(row["completion"]), *cells)
        return table


def cut_completions(run_folder: Path, step: int) -> None:
    """Drop files of rollouts and evaluations after `step`."""
    for file in (run_folder / COMPLETIONS).glob("*step_*.jsonl"):
        match = re.fullmatch(r"(?:.+_)?step_(\d+)\.jsonl", file.name)
        if match and int(match[1]) > step:
            file.unlink()


def _text(value: Any) -> str:
    """Return the text of a prompt or completion: the last message of a conversation, truncated."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    shown = str(value)
    return shown if len(shown) <= LONGEST_SHOWN else shown[:LONGEST_SHOWN] + " ..."


def _cell(value: Any, *, narrow: bool) -> str:
    """Return a value that a reward function logged, on one line and short where its name stands beside it."""
    shown = _number(value) if isinstance(value, float) else _text(value)
    line = " ".join(shown.split())
    return shown if not narrow else line if len(line) <= LONGEST_VALUE else f"{line[:LONGEST_VALUE]}..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
