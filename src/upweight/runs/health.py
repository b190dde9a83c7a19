"""Checks the rows of metrics.jsonl by the rules of `health_rules.yaml`; reports each verdict once, with its remedy."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from upweight.files import packaged_yaml
from upweight.log import counted

START_ROWS, START_STEPS = 5, 20  # logs of the first steps that define the start values
MIN_ROWS = 3  # logs that a verdict needs, however many steps each covers
REPEAT_AFTER = 100  # steps without a verdict after which it is reported again

MetricsRow = Mapping[str, Any]
RunKind = Literal["online", "pairs", "offline"]
Relation = Literal["above", "below", "near"]  # near: no further from 0 than the threshold
SIGNS: dict[Relation, str] = {"above": ">", "below": "<", "near": "within"}
WORDS: dict[str, Relation] = {sign: relation for relation, sign in SIGNS.items()}


@dataclass(frozen=True)
class Sign:
    """A comparison with a metric of metrics.jsonl; the head of `health_rules.yaml` says how metrics are written."""

    metric: str
    relation: Relation
    threshold: float

    def holds(self, value: float) -> bool:
        if self.relation == "near":
            return abs(value) <= self.threshold
        return value > self.threshold if self.relation == "above" else value < self.threshold


@dataclass(frozen=True)
class Rule:
    """A verdict and the signs that have to hold together for so many optimizer steps; the first is its evidence."""

    name: str
    level: Literal["warning", "alarm"]
    kind: RunKind  # of run
    when: str  # signs, as `metric > 0.5 and other within 0.1`
    steps: int
    meaning: str
    remedy: str
    after: int = 0  # first step that counts
    averaged: bool = False  # the mean over the steps counts, for metrics that jump about
    from_start: bool = False  # it has to hold in every step since the first, at least `steps` of them
    hidden_by: Sequence[str] = ()  # verdicts that are more specific

    @cached_property
    def signs(self) -> list[Sign]:
        """The comparisons of `when`."""
        parts = [sign.split() for sign in self.when.split(" and ")]
        return [Sign(metric, WORDS[relation], float(threshold)) for metric, relation, threshold in parts]

    @property
    def min_rows(self) -> int:
        """Return how many logs the rule needs; one that looks back to the first step can read it off a mean."""
        return 1 if self.from_start else min(MIN_ROWS, self.steps)


_TABLES: dict[str, Any] = packaged_yaml(Path(__file__).with_name("health_rules.yaml"))
RULES: tuple[Rule, ...] = tuple(Rule(**entry) for entry in _TABLES["rules"])
EXPLAINED: dict[str, str] = _TABLES["explained"]  # what looks wrong and is not


@dataclass(frozen=True)
class Verdict:
    """A problem of a run: its evidence, since when it holds, what it means, and the remedy."""

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
        """Return the verdict as one line for the terminal."""
        return f"{self.level}: {self.name} at step {self.step}: {self.seen()}. Remedy: {self.remedy}."

    def seen(self) -> str:
        """Return the meaning with the evidence."""
        limit = f", {SIGNS[self.relation]} {self.threshold:g}" + (" of 0" if self.relation == "near" else "")
        limit = limit if self.threshold or self.relation != "near" else ""  # the value says it
        return f"{self.meaning} ({self.metric} {self.value:.4g}{limit}, for {counted(self.steps, 'step')})"


class Waiting(NamedTuple):
    """A rule that has not had enough steps."""

    name: str
    level: str
    step: int  # at which it judges for the first time


class Health:
    """Takes the rows of a run in order and returns the new verdicts of each."""

    def __init__(self) -> None:
        self.rows: dict[bool, deque[MetricsRow]] = {False: deque(), True: deque()}  # of training, of evaluations
        self.start: list[MetricsRow] = []
        self.start_value: dict[str, float | None] = {}  # means of `start`
        self.lowest: dict[str, float] = {}
        self.rewards = (math.inf, -math.inf)  # the lowest and the highest of a completion
        self.held_at: dict[tuple[str, str], int] = {}  # last step at which a verdict held
        self.keeps = max(rule.steps for rule in RULES)

    def take(self, row: MetricsRow) -> list[Verdict]:
        """Return the verdicts that are new with this row."""
        evaluation = any(name.startswith("eval_") for name in row)
        if not evaluation and "loss" not in row:
            return []
        self._remember_row(row, evaluation)
        rules, rows = self._rules(), self.rows[evaluation]
        holding = [(rule, verdict) for rule in rules for verdict in self._verdicts(rule, row, rows)]
        names = {rule.name for rule, _ in holding}
        new_verdicts = []
        for rule, verdict in holding:
            if names.intersection(rule.hidden_by):
                continue
            judged = verdict.metric.startswith("rewards/")
            of = verdict.metric.rpartition("/")[0] if judged else ""  # each reward is judged by itself
            known, self.held_at[rule.name, of] = self.held_at.get((rule.name, of)), verdict.step
            if known is None or verdict.step - known >= REPEAT_AFTER:
                new_verdicts.append(verdict)
        return new_verdicts

    def too_early(self) -> list[Waiting]:
        """Return the rules that have not had enough steps, those that judge first before the others."""
        last = self.rows[False][-1] if self.rows[False] else {}
        judged: set[str] = set()
        waiting: dict[str, Waiting] = {}
        for rule in self._rules():
            if not all(_matching_metrics(sign.metric, last) for sign in rule.signs):
                continue  # not measured here, or only by evaluations, which come when they come
            needed = rule.after + rule.steps
            if last["step"] >= needed and len(self.rows[False]) >= rule.min_rows:
                judged.add(rule.name)
            else:
                waiting.setdefault(rule.name, Waiting(rule.name, rule.level, needed))
        return sorted((one for one in waiting.values() if one.name not in judged), key=lambda one: one.step)

    def _rules(self) -> list[Rule]:
        """Return the rules for this kind of run; the metrics that a run logs say which it is."""
        first = self.start[0] if self.start else {}
        kinds = ("offline", "pairs") if "rewards/accuracies" in first else ("offline",)
        kinds = ("online",) if "frac_reward_zero_std" in first else kinds
        return [rule for rule in RULES if rule.kind in kinds]

    def _remember_row(self, row: MetricsRow, evaluation: bool) -> None:
        rows = self.rows[evaluation]
        rows.append(row)
        while len(rows) > MIN_ROWS and rows[0]["step"] <= row["step"] - self.keeps:
            rows.popleft()
        for name in row:
            if name.endswith("loss") and (value := _finite_number(row[name])) is not None:
                self.lowest[name] = min(value, self.lowest.get(name, math.inf))
        if evaluation:
            return
        least, most = (_finite_number(row.get(f"reward_{end}")) for end in ("min", "max"))
        if least is not None and most is not None:
            self.rewards = min(self.rewards[0], least), max(self.rewards[1], most)
        if not self.start or (len(self.start) < START_ROWS and row["step"] <= START_STEPS):
            self.start.append(row)
            self.start_value = {}

    def _verdicts(self, rule: Rule, row: MetricsRow, rows: deque[MetricsRow]) -> Iterable[Verdict]:
        first, *others = rule.signs
        metrics, step, min_rows = _matching_metrics(first.metric, row), row["step"], rule.min_rows
        if not metrics or step - rule.after < rule.steps or len(rows) < min_rows:
            return
        if rule.from_start and rows[0] is not self.start[0]:
            return
        window = list(takewhile(lambda known: rule.from_start or known["step"] > step - rule.steps, reversed(rows)))
        window = window if len(window) >= min_rows else list(islice(reversed(rows), min_rows))
        value_of = partial(self._value_if_held, window=window, averaged=rule.averaged)
        before, _, after = first.metric.partition("*")
        for metric in metrics:
            value = value_of(metric, first)
            same = metric[len(before) : len(metric) - len(after)] if after else ""  # what `*` stands for
            needed = [(sign, _matching_metrics(sign.metric.replace("*", same), row)) for sign in others]
            held = (any(value_of(name, sign) is not None for name in names) for sign, names in needed)
            if value is not None and all(held):
                covered = step if rule.from_start else max(rule.steps, step - window[-1]["step"] + 1)
                evidence = (step, metric, value, first.relation, first.threshold, covered)
                yield Verdict(rule.name, rule.level, *evidence, rule.meaning, rule.remedy)

    def _value_if_held(self, metric: str, sign: Sign, window: list[MetricsRow], averaged: bool) -> float | None:
        """Return the value by which a sign holds over a window of rows, newest first, or None."""
        values = [value for row in window if (value := self._metric_value(metric, row)) is not None]
        if not averaged:
            return values[0] if len(values) == len(window) and all(map(sign.holds, values)) else None
        mean = sum(values) / len(values) if 2 * len(values) >= len(window) else math.nan
        return mean if sign.holds(mean) else None

    def _metric_value(self, metric: str, row: MetricsRow) -> float | None:
        """Return a metric of a row, or its value relative to earlier rows."""
        name, _, against = metric.partition(":")
        value = _finite_number(row.get(name))
        if value is None or not against:
            return value
        if against == "worse":
            return value / self.lowest[name] if self.lowest.get(name, 0) > 0 else None
        if against == "earned":  # 0 or one size: the mean is share x size, the mean of squares share x size x size
            std = _finite_number(row.get(name.removesuffix("mean") + "std"))
            return value**2 / (value**2 + std**2) if std else None
        if against == "missing":
            return self._missing(value, _finite_number(row.get(f"{name}_std")) or 0.0)
        if against == "climbed":
            start, highest = self._start_value(name), self.rewards[1]
            return (value - start) / (highest - start) if start is not None and start < highest < math.inf else None
        start_value, spread = self._start_value(name), self._start_value(f"{name}_std")
        if against == "growth":
            return value / start_value if start_value is not None and start_value > 0 else None
        if start_value is None or spread is None:
            return None
        # If the reward was 0 at first, the present spread decides whether it has risen.
        return (value - start_value) / max(spread, _finite_number(row.get(f"{name}_std")) or 0.0, 1e-6)

    def _missing(self, value: float, std: float) -> float | None:
        """Return how many standard deviations a mean lies below the highest reward; None where all are the same."""
        lowest, highest = self.rewards
        if not lowest < highest:
            return None
        gap = highest - value
        return gap / std if std else math.inf if gap > 1e-6 * (highest - lowest) else 0.0

    def _start_value(self, name: str) -> float | None:
        if name not in self.start_value:
            values = [value for row in self.start if (value := _finite_number(row.get(name))) is not None]
            self.start_value[name] = sum(values) / len(values) if values and len(values) == len(self.start) else None
        return self.start_value[name]


def verdicts(rows: Iterable[MetricsRow]) -> list[Verdict]:
    """Return every verdict on a run, from the rows of its metrics.jsonl, without those that later ones replace."""
    health = Health()
    given = [verdict for row in rows for verdict in health.take(row)]
    left_out = outdated(verdict.name for verdict in given)
    return [verdict for verdict in given if verdict.name not in left_out]


def outdated(names: Iterable[str]) -> set[str]:
    """Return the verdicts on the first steps that another verdict of the run replaces."""
    reported = set(names)
    return {rule.name for rule in RULES if rule.from_start and reported.intersection(rule.hidden_by)}


def too_early(rows: Iterable[MetricsRow]) -> list[Waiting]:
    """Return the rules that the rows of a metrics.jsonl are too few for."""
    health = Health()
    for row in rows:
        if "loss" in row:  # a row of training
            health._remember_row(row, evaluation=False)
    return health.too_early()


def _matching_metrics(pattern: str, row: MetricsRow) -> list[str]:
    """Return the metrics of a row that match a sign: the first of several alternatives, or all that match a `*`."""
    names, colon, against = pattern.partition(":")
    if "*" in names:
        return [name + colon + against for name in row if fnmatchcase(name, names)]
    return [name + colon + against for name in names.split("|") if name in row][:1]


def _finite_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
