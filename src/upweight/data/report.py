"""The report on data preparation: rows read, kept and dropped, token lengths, and suggested settings."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from upweight.errors import UserError
from upweight.log import counted, logger

PERCENTILES = (50, 90, 95, 99)
ROUNDING = 64  # suggested lengths are multiples of this
MOST_NAMED = 5  # rows in a message
ODD_ROWS = {
    "prompt": "the prompt is empty",
    "answer": "the answer is empty",
    "pair": "the chosen and the rejected answer are the same, which tells nothing of what is better",
}


@dataclass
class EntryCounts:
    """The counts of one dataset entry: rows read, records kept, records dropped and changed."""

    where: str
    evaluation: bool
    read: int
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> records
    notes: Counter[str] = field(default_factory=Counter)  # change made to records that were kept -> records
    odd: dict[str, list[str]] = field(default_factory=dict)  # what is odd (`ODD_ROWS`) -> places of the first rows

    def name_odd(self, odd: str, places: Iterable[str]) -> None:
        """Take the places of further odd rows, as far as a message names them."""
        named = self.odd.setdefault(odd, [])
        named += islice(places, MOST_NAMED - len(named))


@dataclass
class PrepareReport:
    """The summary that `preprocess` prints and the cache stores."""

    parts: list[EntryCounts]
    lengths: dict[str, dict[str, int]]  # of training rows before any was dropped or cut: prompt -> {"50%": 12, ...}
    suggested: dict[str, dict[str, int]]  # setting -> {"99%": 512, "100%": 1024}: the value that keeps this share
    within: dict[str, tuple[int, float]]  # setting -> its present value, share of training rows within it
    seconds: float = 0.0
    cached: bool = False

    @property
    def train_rows(self) -> int:
        return sum(part.kept for part in self.parts if not part.evaluation)

    @property
    def eval_rows(self) -> int:
        return sum(part.kept for part in self.parts if part.evaluation)

    def lines(self) -> list[str]:
        lines = [_entry_line(part) for part in self.parts]
        if self.lengths:
            lines.append(f"{'tokens':<12}" + "".join(f"{head:>8}" for head in next(iter(self.lengths.values()))))
            for name, values in self.lengths.items():
                lines.append(f"{name:<12}" + "".join(f"{value:>8}" for value in values.values()))
        for setting, values in self.suggested.items():
            near, most = values["99%"], values["100%"]
            choices = f"{most} keeps all" if near == most else f"{near} keeps 99%, {most} keeps all"
            now = "(now {}: {:.1%} of rows fit)".format(*self.within[setting]) if setting in self.within else ""
            lines.append(f"suggested {setting}: {choices} {now}".rstrip())
        source = "from the cache" if self.cached else f"in {self.seconds:.1f} s"
        evaluation = f", {self.eval_rows:,} to evaluate on" if self.eval_rows else ""
        return [*lines, f"prepared {counted(self.train_rows, 'row')} to train on{evaluation}, {source}"]

    def nothing_left(self, use: str) -> str:
        """Return the error of data without a row to `use` (train, evaluate), with the length that keeps rows."""
        reasons = {reason for part in self.parts if part.evaluation == (use == "evaluate") for reason in part.dropped}
        raised = [
            f"`{setting}: {values['100%']}` keeps them"
            for setting, values in self.suggested.items()
            if any(setting in reason for reason in reasons)
        ]
        why = "; ".join(raised) or "The lines above count what each was dropped for"
        if use == "evaluate" and not any(part.where.startswith("test_datasets") for part in self.parts):
            off = "`val_set_size: 0` (and `eval_samples: 0`) trains without an evaluation"
            why += f". {off}, a larger one holds out more rows"
        return f"no rows are left to {use} on. {why}."


def warn_of_odd_rows(report: PrepareReport, notes: Mapping[str, str]) -> None:
    """Warn of rows that are kept and teach little, with the first ones; `notes` has the note that counts each."""
    for counts in report.parts:
        in_config = counts.where.startswith(("datasets", "test_datasets"))
        remedy = f"`filter` {'in the entry' if in_config else 'of the dataset'} leaves rows out"
        for odd, (place, *next_ones) in counts.odd.items():
            rows, named = counts.notes[notes[odd]], ", ".join(next_ones)
            others = f"; so are those of {rows:,} rows in all, next {named}, and they are kept"
            others = others if next_ones else "; the row is kept"
            logger.warning("%s, %s: %s%s. %s", counts.where, place, ODD_ROWS[odd], others, remedy)


def require_differing_pairs(report: PrepareReport, rows: Iterable[Any], note: str) -> None:
    """Raise a UserError if the two answers of each training row are the same; `note` is the one that counts such."""
    same = [part for part in report.parts if not part.evaluation and part.notes[note]]
    # Rows that repeat earlier ones are left out after they are counted, so the count alone does not tell.
    if sum(part.notes[note] for part in same) < report.train_rows or not same:
        return
    if all(row["chosen_ids"] == row["rejected_ids"] for row in rows):
        problem = f"{ODD_ROWS['pair']}; so are those of all rows ({report.train_rows:,})"
        remedy = "See which columns are read as the answers, and whether `sequence_len` cuts them before they differ"
        raise UserError(f"{same[0].where}, {same[0].odd['pair'][0]}: {problem}. {remedy}.")


REPORT_JSON = TypeAdapter(PrepareReport)  # to and from JSON values


def _entry_line(part: EntryCounts) -> str:
    changes = [f"{count:,} dropped: {reason}" for reason, count in part.dropped.most_common()]
    changes += [f"{count:,} {note}" for note, count in part.notes.most_common()]
    use = ", for evaluation" if part.evaluation else ""
    return f"{part.where}{use}: {counted(part.read, 'row')} read, {part.kept:,} kept" + "".join(
        f"; {c}" for c in changes
    )


def percentiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    values = np.percentile(lengths, PERCENTILES, method="higher")
    return {f"{p}%": int(v) for p, v in zip(PERCENTILES, values, strict=True)} | {"max": int(lengths.max())}


def measure(
    parts: list[EntryCounts], lengths: dict[str, NDArray[np.int64]], limits: dict[str, tuple[str, int | None]]
) -> PrepareReport:
    """Build the report; `limits` maps a setting to the name of the lengths it bounds and to its present value."""
    counted = {name: values for name, values in lengths.items() if len(values) and values.any()}
    shown = {name: percentiles(values) for name, values in counted.items()}
    suggested: dict[str, dict[str, int]] = {}
    within: dict[str, tuple[int, float]] = {}
    for setting, (name, present) in limits.items():
        if name in counted:
            suggested[setting] = {"99%": _round_up(shown[name]["99%"]), "100%": _round_up(shown[name]["max"])}
            if present:
                within[setting] = present, float((counted[name] <= present).mean())
    return PrepareReport(parts, shown, suggested, within)


def _round_up(length: int) -> int:
    return -(-length // ROUNDING) * ROUNDING
