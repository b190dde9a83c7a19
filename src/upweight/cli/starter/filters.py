"""Rows of a user's file with an empty cell, and the function beside the config that leaves them out."""

import json
import re
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from upweight.cli.starter.plan import KINDS, READ, Plan, mapped_columns

TEXTS = {
    "pairs": ("prompt", "chosen", "rejected"),
    "labelled": ("prompt", "completion"),
    "text": ("prompt", "completion", "instruction", "output"),
    "prompts": ("prompt",),
}
KEEP = '''"""Which rows are trained on: change `keep`. See what it leaves out: upweight preprocess {config}"""


def keep(row):
    """Return whether a row is trained on: not where one of these columns is empty."""
    return all(str(row.get(name) or "").strip() for name in {names})
'''


def is_complete(plan: Plan, row: Mapping[str, Any]) -> bool:
    """Return whether a row has text in every column that its method needs."""
    return not any(_is_empty(row.get(name)) for name in _needed(plan))


def leave_out_empty(plan: Plan, output: Path) -> None:
    """Name rows with empty cells, and write the filter that leaves them out, in a file that is not there yet."""
    needed = _needed(plan)
    counts = {name: sum(_is_empty(row.get(name)) for row in plan.rows) for name in needed}
    left_out = sum(not is_complete(plan, row) for row in plan.rows)
    if not left_out or left_out == len(plan.rows):
        return
    where = ", ".join(f"{number} in {name!r}" for name, number in counts.items() if number)
    problem = f"empty cells: {left_out} of the first {len(plan.rows)} rows have one ({where})"
    target = _free_file(output, text := KEEP.format(config=output, names=needed))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    function = plan.entry["filter"] = f"{target.stem}.keep"
    plan.notes.append(f"{problem}; `filter: {function}` leaves such rows out, by {target}, which you can change")


def _free_file(output: Path, text: str) -> Path:
    """Return the file beside the config for a filter: the first that is not there, or holds the same."""
    words = re.sub(r"\W", "_", output.stem)
    names = chain(["filters", f"filters_{words}"], (f"filters_{words}_{number}" for number in count(2)))
    files = (output.parent / f"{name}.py" for name in names)
    return next(one for one in files if not one.exists() or one.read_text(encoding="utf-8") == text)


def repeated_notes(plan: Plan) -> list[str]:
    """Return how many rows repeat an earlier one in the columns that are read, and what leaves them out."""
    read = mapped_columns(plan.entry) or [name for name in plan.table.columns if name in READ]
    columns = plan.table.columns if plan.method == "grpo" else read  # whose rewards get every column
    first: dict[str, int] = {}  # row of each text
    texts = [json.dumps([row.get(name) for name in columns], default=str) for row in plan.rows]
    repeated = [number for number, text in enumerate(texts) if first.setdefault(text, number) < number]
    if not columns or not repeated:
        return []
    verb, of_earlier = "repeats" if len(repeated) == 1 else "repeat", first[texts[repeated[0]]]
    problem = (
        f"{len(repeated)} of the first {len(texts)} rows {verb} an earlier one (row {repeated[0]}: row {of_earlier})"
    )
    remedy = "`dataset_exact_deduplication: true` in the config leaves repeated rows out (upweight docs data)"
    return [f"duplicates: {problem}; {remedy}"]


def _needed(plan: Plan) -> list[str]:
    """Return the columns of text that the method, and the reward of right answers, cannot do without."""
    form, columns = plan.entry.get("type"), plan.table.columns
    answers = [plan.answer] if plan.answer else []
    if isinstance(form, dict):
        marks = (form.get("field_label"), form.get("field_winner"))
        names = [name for name in mapped_columns(plan.entry) if name not in marks]
    elif form is not None or {"messages", "conversations"} & set(columns):
        return []
    else:
        names = [name for name in TEXTS[KINDS[plan.method]] if name in columns]
    return [name for name in (*names, *answers) if any(isinstance(row.get(name), str) for row in plan.rows)]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
