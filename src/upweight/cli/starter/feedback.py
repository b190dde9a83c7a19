"""Feedback that no method reads as it stands: a column that prefers an answer, labels in words, ratings."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upweight.data.columns import ANSWERED, csv_separator, guess_columns, words_of
from upweight.data.raw_row import Row, RowError
from upweight.errors import UserError

Rows = Sequence[Mapping[str, Any]]

PREFERS = {"preferred", "preference", "prefers", "prefer", "winner", "better", "best", "choice", "chosen", "selected",
           "pick", "picked", "vote", "verdict"}  # fmt: skip
UNDECIDED = {"", "tie", "draw", "equal", "same", "both", "neither", "none"}
GOOD = ("good", "true", "1", "yes", "y", "up", "positive", "correct", "right", "liked", "like", "helpful", "accepted",
        "accept", "desirable", "pass", "+")  # fmt: skip
BAD = ("bad", "false", "0", "no", "n", "down", "negative", "incorrect", "wrong", "disliked", "dislike", "unhelpful",
       "rejected", "reject", "undesirable", "fail", "-")  # fmt: skip
FEW, SHORT = 5, 30  # values of a column of labels, and characters of one


def refuse_preference(file: Path, columns: Sequence[str], rows: Rows) -> None:
    """Raise a UserError where a column says which of several answers is better, with lines that make pairs of them."""
    answers = [name for name in columns if set(ANSWERED) & set(words_of(name)) and not PREFERS & set(words_of(name))]
    tag_of = {name: {_plain(name), re.findall(r"[a-z]+|\d+", name.lower())[-1]} for name in answers}
    paired = {"chosen", "rejected"} <= guess_columns("pairs", columns).keys()
    for name in columns if len(answers) > 1 else ():
        values = [_plain(row.get(name)) for row in rows]
        decided = set(values) - UNDECIDED
        prefers = decided and decided <= set().union(*(tags for other, tags in tag_of.items() if other != name))
        if not decided or (not prefers and (paired or not PREFERS & set(words_of(name)) or len(decided) > FEW)):
            continue
        first, second = [other for other in answers if other != name][:2]
        lines = _pairing_lines(columns, rows, name, {one: tag_of[one] if prefers else set() for one in (first, second)})
        problem = f"{name!r} says which of {' and '.join(map(repr, answers))} is better, and one of them alone would"
        remedy = "teach worse answers too. Make pairs of a better and a worse answer"
        raise UserError(f"{file}: {problem} {remedy}:\n{_recipe(file, name, lines, 'pairs')}")


def _pairing_lines(columns: Sequence[str], rows: Rows, name: str, tag_of: Mapping[str, set[str]]) -> list[str]:
    """Return the lines that make pairs of two answers by what a column says, the first mark standing for the first."""
    marks = sorted({str(row.get(name)) for row in rows if _plain(row.get(name)) not in UNDECIDED})
    (first, its_tags), (second, other_tags) = tag_of.items()
    better = [mark for mark in marks if _plain(mark) in its_tags] if its_tags else marks[:1]
    worse = [mark for mark in marks if _plain(mark) in other_tags] if other_tags else marks[-1:]
    prompts = list(guess_columns("prompts", [one for one in columns if one not in (name, *tag_of)]).values())
    return [
        f"rows = rows[rows[{name!r}].isin({better + worse})]",
        f"first = rows[{name!r}].isin({better})   # where {first!r} is the better one",
        f"a, b = rows[{first!r}], rows[{second!r}]",
        f"pairs = rows[{prompts}].assign(chosen=a.where(first, b), rejected=b.where(first, a))",
    ]


def _plain(value: Any) -> str:
    return " ".join(re.findall(r"[a-z]+|\d+", str("" if value is None else value).lower()))


def is_label(value: Any) -> bool:
    """Return whether training reads a value as true or false."""
    try:
        Row(label=value).flag("label")
    except RowError:
        return False
    return True


def is_rating(name: str, rows: Rows) -> bool:
    """Return whether a column holds numbers that grade rows."""
    named = any(word in name.lower() for word in ("rating", "score", "star", "grade", "quality"))
    values = [str(row.get(name, "")).strip() for row in rows]
    return named and all(value.replace(".", "", 1).lstrip("-").isdigit() for value in values)


def labels_in_words(columns: Sequence[str], rows: Rows) -> tuple[str, list[str]] | None:
    """Return a column that marks rows otherwise than by true and false, with its values, the good one first."""
    name = guess_columns("labelled", columns).get("label")
    values = [row.get(name) for row in rows] if name else []
    if name is None or is_rating(name, rows) or all(is_label(value) for value in values):
        return None
    if not all(value is None or isinstance(value, str | int | float) for value in values):
        return None
    texts = list(dict.fromkeys(str("" if value is None else value).strip() for value in values))
    is_mark = len(texts) > 1 or texts[0].lower() in (*GOOD, *BAD)
    if not is_mark or len(texts) > FEW or len(texts) == len(rows) > 2 or any(len(text) > SHORT for text in texts):
        return None
    return name, sorted(texts, key=lambda text: _goodness(text.lower()))


def _goodness(text: str) -> int:
    return 0 if text in GOOD else 2 if text in BAD or not text else 1


def _marked_lines(name: str, values: Sequence[str]) -> list[str]:
    """Return the line that leaves out rows without a mark, which are neither good nor bad, if there are any."""
    judged = [value for value in values if value.lower() in (*GOOD, *BAD)]
    decided = judged if {_goodness(value.lower()) for value in judged} == {0, 2} else [one for one in values if one]
    if len(decided) == len(values):
        return []
    return [f"rows = rows[rows[{name!r}].str.strip().isin({decided})]   # rows without a mark are left out"]


def label_problem(file: Path, name: str, values: Sequence[str], columns: Sequence[str]) -> str:
    """Return what is amiss with labels in words, with lines that make them true and false."""
    lines = _marked_lines(name, values)
    lines += [f"rows[{name!r}] = rows[{name!r}].str.strip() == {values[0]!r}   # true for good rows"]
    if "prompt" not in guess_columns("labelled", columns):
        lines += ["rows = rows.rename(columns={'...': 'prompt'})   # write the name of the column with the prompts"]
    held = " and ".join(repr(value) if value else "nothing" for value in values)
    problem = f"{name!r} holds {held}; kto learns from good and bad rows, marked true or false"
    return f"{file}: {problem}:\n{_recipe(file, name, lines, 'rows')}"


def rating_advice(name: str) -> str:
    """Return what a column of ratings is good for."""
    good = f"def good(row): return float(row[{name!r}]) >= 4"
    return (
        f"{name!r} holds ratings: `filter: mine.good` in the entry trains on good rows only, with `{good}` in "
        "mine.py; kto learns from good and bad ones, once a column 'label' says true or false of each row; rows of "
        "one prompt with a high and a low rating make pairs for dpo"
    )


def refuse_labels(file: Path, columns: Sequence[str], rows: Rows) -> None:
    """Raise a UserError where the labels for kto cannot be read as true or false."""
    column_of = guess_columns("labelled", columns)
    name = column_of.get("label")
    if name is None or "completion" not in column_of or {"chosen", "rejected"} <= set(columns):
        return  # pairs, or columns that are missing
    if (marked := labels_in_words(columns, rows)) is not None:
        raise UserError(label_problem(file, *marked, columns))
    for number, row in enumerate(rows):
        if not is_label(row.get(name)):
            advice = f". {rating_advice(name)}" if is_rating(name, rows) else ""
            problem = f"kto needs true or false in {name!r}, and row {number} has {row.get(name)!r}"
            raise UserError(f"{file}: {problem}{advice}.")


def pairing_advice(file: Path, columns: Sequence[str], rows: Rows) -> str | None:
    """Return how rows with one answer each become pairs, by their ratings or labels; None where they have two."""
    column_of, marked = guess_columns("labelled", columns), labels_in_words(columns, rows)
    answer, name = column_of.get("completion"), column_of.get("label")
    name = next((one for one in columns if is_rating(one, rows)), name)
    if answer is None or {"chosen", "rejected"} & guess_columns("pairs", columns).keys() - {name}:
        return None
    one_answer = f"rows have one answer, {answer!r}, and pairs need a better and a worse one of the same prompt"
    if name is None or "prompt" not in column_of:
        return f"{one_answer}: write both into a row, as prompt, chosen and rejected; sft trains on rows as they are."
    order = "pandas.to_numeric" if is_rating(name, rows) else "lambda marks: marks.str.lower().isin(['true', '1'])"
    if marked is not None:
        order = f"lambda marks: marks.str.strip() == {marked[1][0]!r}"
    lines = [
        *(_marked_lines(*marked) if marked is not None else ()),
        f"rows = rows.sort_values({name!r}, key={order}, ascending=False)",
        f"of_prompt = rows.groupby({column_of['prompt']!r})",
        "best, worst = of_prompt.first(), of_prompt.last()",
        f"pairs = best.assign(chosen=best[{answer!r}], rejected=worst[{answer!r}])[best[{name!r}] != worst[{name!r}]]",
        "pairs = pairs[['chosen', 'rejected']].reset_index()",
    ]
    return f"{one_answer}. Pair rows of one prompt by {name!r}:\n{_recipe(file, name, lines, 'pairs')}"


def second_answer_advice(columns: Sequence[str], rows: Rows) -> str:
    """Return the question whether rows with two texts that may be answers are pairs; nothing where they have one."""
    column_of = guess_columns("text", columns)
    for name in columns:
        is_answer = name not in column_of.values() and set(ANSWERED) & set(words_of(name))
        if len(column_of) == 2 and is_answer and any(" " in str(row.get(name) or "").strip() for row in rows):
            first = column_of["output"]
            return f". Is one of {first!r} and {name!r} the better answer? Then name them chosen and rejected, for dpo"
    return ""


def _recipe(file: Path, column: str, lines: Sequence[str], table: str) -> str:
    """Return lines of Python that read a file, with the values of a column as text, and write another."""
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    target = f"{plain.stem}-{'pairs' if table == 'pairs' else 'labelled'}.csv"
    read = f"rows = pandas.read_json({str(file)!r}, lines={plain.suffix != '.json'})"
    if plain.suffix in (".csv", ".tsv"):
        with file.open(encoding="utf-8-sig", errors="replace") as opened:
            separator = csv_separator(file, opened.readline())
        read = f"rows = pandas.read_csv({str(file)!r}, dtype=str, keep_default_na=False, sep={separator!r})"
    elif plain.suffix == ".parquet":
        read = f"rows = pandas.read_parquet({str(file)!r})"
    as_text = [] if "read_csv" in read else [f"rows[{column!r}] = rows[{column!r}].astype(str)"]
    code = ["import pandas", read, *as_text, *lines, f"{table}.to_csv({target!r}, index=False)"]
    return "\n".join(f"    {line}" for line in code) + f"\nThen: upweight new {target}"
