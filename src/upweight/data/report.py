"""The report on data preparation: rows read, kept and dropped, token lengths, and suggested settings."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)
ROUNDING = 64  # suggested lengths are multiples of this


@dataclass
class EntryCounts:
    """The counts of one dataset entry: rows read, records kept, records dropped and changed."""

    where: str
    evaluation: bool
    read: int
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> records
    notes: Counter[str] = field(default_factory=Counter)  # change made to records that were kept -> records


@dataclass
class PrepareReport:
    """The summary that `preprocess` prints and the cache stores."""

    parts: list[EntryCounts]
    lengths: dict[str, dict[str, int]]  # of training rows before any was dropped or cut: prompt -> {"50%": 12, ...}
    suggested: dict[str, dict[str, int]]  # setting -> {"99%": 512, "100%": 1024}: the value that keeps this share
    within: dict[str, float]  # setting -> share of training rows within its present value
    present: dict[str, int]
    seconds: float = 0.0
    cached: bool = False

    @property
    def train_rows(self) -> int:
        return sum(part.kept for part in self.parts if not part.evaluation)

    @property
    def eval_rows(self) -> int:
        return sum(part.kept for part in self.parts if part.evaluation)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**vars(self), "parts": [dict(vars(part)) for part in self.parts]}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "PrepareReport":
        """Return the report that `to_json` wrote."""
        parts = [
            EntryCounts(**{**part, "dropped": Counter(part["dropped"]), "notes": Counter(part["notes"])})
            for part in values["parts"]
        ]
        return PrepareReport(**{**values, "parts": parts})

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [_line(part) for part in self.parts]
        if self.lengths:
            heads = list(next(iter(self.lengths.values())))
            lines.append(f"{'tokens':<12}" + "".join(f"{head:>8}" for head in heads))
            lines += [
                f"{name:<12}" + "".join(f"{row[head]:>8}" for head in heads) for name, row in self.lengths.items()
            ]
        for setting, values in self.suggested.items():
            choices = dict.fromkeys(f"{value} keeps {share}" for share, value in values.items())
            if values["99%"] == values["100%"]:
                choices = {f"{values['100%']} keeps all": None}
            present = self.present.get(setting)
            now = f" (now {present}: {self.within[setting]:.1%} of rows fit)" if present else ""
            lines.append(f"suggested {setting}: {', '.join(choices).replace('100%', 'all')}{now}")
        source = "from the cache" if self.cached else f"in {self.seconds:.1f} s"
        evaluation = f", {self.eval_rows:,} to evaluate on" if self.eval_rows else ""
        return [*lines, f"prepared {self.train_rows:,} rows to train on{evaluation}, {source}"]


def _line(part: EntryCounts) -> str:
    changes = [f"{count:,} dropped: {reason}" for reason, count in part.dropped.most_common()]
    changes += [f"{count:,} {note}" for note, count in part.notes.most_common()]
    use = ", for evaluation" if part.evaluation else ""
    return f"{part.where}{use}: {part.read:,} rows read, {part.kept:,} kept" + "".join(f"; {c}" for c in changes)


def percentiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return the percentiles and the maximum of some lengths."""
    values = np.percentile(lengths, PERCENTILES, method="higher")
    return {f"{p}%": int(v) for p, v in zip(PERCENTILES, values, strict=True)} | {"max": int(lengths.max())}


def measure(
    parts: list[EntryCounts], lengths: dict[str, NDArray[np.int64]], limits: dict[str, tuple[str, int | None]]
) -> PrepareReport:
    """Build the report; `limits` maps a setting to the name of the lengths it bounds and to its present value."""
    counted = {name: values for name, values in lengths.items() if len(values) and values.any()}
    suggested: dict[str, dict[str, int]] = {}
    within: dict[str, float] = {}
    for setting, (name, present) in limits.items():
        if name in counted:
            shares = percentiles(counted[name])
            suggested[setting] = {"99%": _round_up(shares["99%"]), "100%": _round_up(shares["max"])}
            if present:
                within[setting] = float((counted[name] <= present).mean())
    present_values = {setting: value for setting, (_, value) in limits.items() if value and setting in suggested}
    shown = {name: percentiles(values) for name, values in counted.items()}
    return PrepareReport(parts, shown, suggested, within, present_values)


def _round_up(length: int) -> int:
    return -(-length // ROUNDING) * ROUNDING


def lengths_of(columns: dict[str, Any]) -> tuple[int, int, int]:
    """Return the token counts of a record's prompt, of its longest completion, and of its longest sequence."""
    if "chosen_ids" in columns:
        return _with_prompt(columns, max(len(columns["chosen_ids"]), len(columns["rejected_ids"])))
    if "completion_ids" in columns:
        return _with_prompt(columns, len(columns["completion_ids"]))
    if "scored" in columns:
        scored = sum(columns["scored"])
        return len(columns["ids"]) - scored, scored, len(columns["ids"])
    if "ids" in columns:
        return 0, 0, len(columns["ids"])
    return _with_prompt(columns, 0)


def _with_prompt(columns: dict[str, Any], completion: int) -> tuple[int, int, int]:
    prompt = len(columns["prompt_ids"])
    return prompt, completion, prompt + completion
