"""The health rules of training, as `health_rules.yaml` lists them: when each holds, what it means, the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

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
    hidden_by: Sequence[str] = ()  # verdicts that are more specific

    @cached_property
    def signs(self) -> list[Sign]:
        """The comparisons of `when`."""
        parts = [sign.split() for sign in self.when.split(" and ")]
        return [Sign(metric, WORDS[relation], float(threshold)) for metric, relation, threshold in parts]


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RULES: tuple[Rule, ...] = tuple(Rule(**entry) for entry in _TABLES["rules"])
EXPLAINED: dict[str, str] = _TABLES["explained"]  # what looks wrong and is not
