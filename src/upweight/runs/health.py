"""Health verdicts: the rows of metrics.jsonl against the rules, each verdict once, in words, with its remedy."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from typing import Any

from upweight.runs.health_rules import RULES, SIGNS, Relation, Rule, Sign

START_ROWS, START_STEPS = 5, 20  # at most so many logs of the first steps say where a run began
FEWEST_ROWS = 3  # logs that a verdict needs, however many steps each covers
AGAIN = 100  # steps a verdict must have been away to be said again

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What is wrong, since when and by which evidence, what it means, what to do."""

    name: str
    level: str
    step: int
    metric: str
    value: float
    relation: Relation
    threshold: float
    steps: int  # for how many it has held
    meaning: str
    remedy: str

    def line(self) -> str:
        """The verdict for the terminal."""
        return f"{self.level}: {self.name} at step {self.step}: {self.seen()}. Remedy: {self.remedy}."

    def seen(self) -> str:
        """What it means, with the evidence."""
        limit = f"{SIGNS[self.relation]} {self.threshold:g}" + (" of 0" if self.relation == "near" else "")
        return f"{self.meaning} ({self.metric} {self.value:.4g}, {limit}, for {self.steps} steps)"


class Health:
    """Takes the rows of a run in order and says which verdicts each of them brings."""

    def __init__(self) -> None:
        self.rows: dict[bool, deque[Row]] = {False: deque(), True: deque()}  # of training, of evaluations
        self.start: list[Row] = []
        self.began: dict[str, float | None] = {}  # means of `start`
        self.lowest: dict[str, float] = {}
        self.held_at: dict[tuple[str, str], int] = {}  # last step at which a verdict held
        self.keeps = max(rule.steps for rule in RULES)

    def take(self, row: Row) -> list[Verdict]:
        """What became true with this row."""
        evaluation = any(name.startswith("eval_") for name in row)
        if not evaluation and "loss" not in row:
            return []
        self._remember(row, evaluation)
        kinds = self._kinds()
        holding = [
            verdict
            for rule in RULES
            if rule.kind in kinds
            for verdict in self._verdicts(rule, row, self.rows[evaluation])
        ]
        names = {verdict.name for verdict in holding}
        hidden_by = {rule.name: set(rule.hidden_by) for rule in RULES}
        fresh = []
        for verdict in holding:
            if hidden_by[verdict.name] & names:
                continue
            of = verdict.metric if verdict.metric.startswith("rewards/") else ""  # each reward is judged by itself
            key, step = (verdict.name, of), verdict.step
            known = self.held_at.get(key)
            self.held_at[key] = step
            if known is None or step - known >= AGAIN:
                fresh.append(verdict)
        return fresh

    def _remember(self, row: Row, evaluation: bool) -> None:
        rows = self.rows[evaluation]
        rows.append(row)
        while len(rows) > FEWEST_ROWS and rows[0]["step"] <= row["step"] - self.keeps:
            rows.popleft()
        if evaluation:
            for name in row:
                if name.endswith("loss") and (value := _number(row[name])) is not None:
                    self.lowest[name] = min(value, self.lowest.get(name, math.inf))
        elif not self.start or (len(self.start) < START_ROWS and row["step"] <= START_STEPS):
            self.start.append(row)
            self.began = {}

    def _kinds(self) -> set[str]:
        """Which rules apply, by what the run logs."""
        first = self.start[0] if self.start else {}
        if "frac_reward_zero_std" in first:
            return {"online"}
        return {"offline", "pairs"} if "rewards/margins" in first else {"offline"}

    def _verdicts(self, rule: Rule, row: Row, rows: deque[Row]) -> Iterable[Verdict]:
        first, *others = rule.signs
        metrics, step = _fitting(first.metric, row), row["step"]
        fewest = min(FEWEST_ROWS, rule.steps)
        if not metrics or step - rule.after < rule.steps or len(rows) < fewest:
            return
        window = list(takewhile(lambda known: known["step"] > step - rule.steps, reversed(rows)))
        window = window if len(window) >= fewest else list(islice(reversed(rows), fewest))
        for metric in metrics:
            value = self._holds(metric, first, window, rule.averaged)
            same = _behind_star(first.metric, metric)
            if value is not None and all(
                any(
                    self._holds(other, sign, window, rule.averaged) is not None
                    for other in _fitting(sign.metric.replace("*", same), row)
                )
                for sign in others
            ):
                covered = max(rule.steps, step - window[-1]["step"] + 1)
                yield Verdict(
                    rule.name, rule.level, step, metric, value, first.relation, first.threshold, covered, rule.meaning,
                    rule.remedy,
                )  # fmt: skip

    def _holds(self, metric: str, sign: Sign, window: list[Row], averaged: bool) -> float | None:
        """The value by which a sign holds over a window of rows, newest first, or None."""
        values: list[float] = []
        for row in window:
            value = self._value(metric, row)
            if value is not None:
                values.append(value)
            if not averaged and (value is None or not _compares(value, sign)):
                return None
        if not averaged:
            return values[0]
        if 2 * len(values) < len(window):
            return None
        mean = sum(values) / len(values)
        return mean if _compares(mean, sign) else None

    def _value(self, metric: str, row: Row) -> float | None:
        """A metric of a row, or what it is measured against its own past."""
        name, _, against = metric.partition(":")
        value = _number(row.get(name))
        if value is None:
            return None
        if against == "worse":
            return value / self.lowest[name] if self.lowest.get(name, 0) > 0 else None
        if not against:
            return value
        if against == "earned":  # 0 or one size: the mean is share x size, the mean of squares share x size x size
            std = _number(row.get(name.removesuffix("mean") + "std"))
            return value**2 / (value**2 + std**2) if std else None
        began = self._began(name)
        if began is None:
            return None
        if against == "growth":
            return value / began if began > 0 else None
        spread = self._began(f"{name}_std")
        if spread is None:
            return None
        # Where nothing was earned at first, the spread of today says whether a rise is one.
        return (value - began) / max(spread, _number(row.get(f"{name}_std")) or 0.0, 1e-6)

    def _began(self, name: str) -> float | None:
        if name not in self.began:
            values = [value for row in self.start if (value := _number(row.get(name))) is not None]
            self.began[name] = sum(values) / len(values) if values and len(values) == len(self.start) else None
        return self.began[name]


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    """Every verdict on a run, from the rows of its metrics.jsonl."""
    health = Health()
    return [verdict for row in rows for verdict in health.take(row)]


def _fitting(pattern: str, row: Row) -> list[str]:
    """The metrics of a row that a sign means: the first that is there of several, or all that fit a `*`."""
    names, colon, against = pattern.partition(":")
    if "*" in names:
        return [name + colon + against for name in row if fnmatchcase(name, names)]
    return [name + colon + against for name in names.split("|") if name in row][:1]


def _behind_star(pattern: str, metric: str) -> str:
    """What a `*` stands for in a metric that fits."""
    before, _, after = pattern.partition("*")
    return metric[len(before) : len(metric) - len(after)] if after else ""


def _compares(value: float, sign: Sign) -> bool:
    if sign.relation == "near":
        return abs(value) <= sign.threshold
    return value > sign.threshold if sign.relation == "above" else value < sign.threshold


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
