"""Feedback in words: a column that prefers an answer, labels in words, ratings; and what each word stands for."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upweight.cli.starter.table import FEW, SHORT, Preference, Table, assigned, plain
from upweight.data.columns import ANSWERED, csv_separator, words_of
from upweight.data.raw_row import Row, RowError, number_in
from upweight.errors import UserError

GOOD = ("good", "true", "1", "1.0", "yes", "y", "up", "positive", "correct", "right", "liked", "like", "helpful",
        "accepted", "accept", "desirable", "pass", "+", "thumbs up", "thumbs_up", "👍",
        "gut", "ja", "richtig", "bon", "oui", "bueno", "sí", "bom", "sim", "buono", "sì", "si", "好", "是")  # fmt: skip
BAD = ("bad", "false", "0", "0.0", "no", "n", "down", "negative", "incorrect", "wrong", "disliked", "dislike",
       "unhelpful", "rejected", "reject", "undesirable", "fail", "-", "thumbs down", "thumbs_down", "👎",
       "schlecht", "nein", "falsch", "mauvais", "non", "malo", "ruim", "não", "cattivo", "差", "否")  # fmt: skip
MOST_MARKS = 10  # different ones, of which a command can name each
RATED = ("rating", "score", "star", "grade", "quality", "csat", "satisfaction")  # in names of columns of ratings
RANKED = ("schulnote", "rang", "rank", "platz")  # the same of those whose lowest is the best
UNRATED = ("", "n/a", "na", "nan", "none", "null", "-")  # cells of such a column in rows that nobody rated


def preference(table: Table) -> Preference | None:
    """Return the column that says which of two answers is better, if any; a UserError where its meaning is not sure."""
    one = table.preference()
    if one is None:
        return None
    problem = f"{table.file}: {one.winner!r} says which of several answers is better, and one of them alone would"
    if len(one.answers) == 2:
        problem = problem.replace("several answers", f"{one.answers[0]!r} and {one.answers[1]!r}")
    problem += " teach worse answers too."
    known = {"winner": one.winner} | ({"prompt": one.prompt} if one.prompt else {})
    if len(one.answers) == 2:
        known |= dict(zip(("answer_a", "answer_b"), one.answers, strict=True))
    if len(one.answers) != 2 or one.prompt is None:
        raise UserError(f"{problem} Name the prompt and the two answers: {table.ask_for('preference', known)}")
    if one.better is None:
        raise UserError(f"{problem} {_ask_values(table, one.winner, 'preference', known)}")
    _check_values(table, one.winner)
    return one


def winner_mapping(table: Table, one: Preference) -> dict[str, Any]:
    """Return the `type` that makes pairs of two answers by what a column says."""
    assert one.better is not None
    column_of = {word: column for words, column in zip(one.better, one.answers, strict=True) for word in words}
    for column in {*one.answers} - {*column_of.values()}:  # of which no row so far says that it is better
        column_of[(re.findall(r"[^\W_]+", column) or [column])[-1]] = column
    winner_values = column_of | {word: None for word in table.values(one.winner) if word not in column_of}
    return {"field_prompt": one.prompt, "field_winner": one.winner, "winner_values": winner_values}


def mark_notes(form: Mapping[str, Any]) -> list[str]:
    """Return what the words of a `type` stand for, and which rows are left out."""
    notes = []
    if (lowest := form.get("label_from")) is not None:
        rest = "lower ones are bad, rows without a number are left out"
        notes.append(f"label_from: in {form['field_label']!r}, {lowest:g} and more is good, {rest}")
    for column, key in (("field_label", "label_values"), ("field_winner", "winner_values")):
        meanings: Mapping[str, Any] = form.get(key, {})
        known = [f"{word!r} is {str(what).lower() if isinstance(what, bool) else repr(what)}"
                 for word, what in meanings.items() if what is not None]  # fmt: skip
        unknown = [repr(word) if word else "nothing" for word, what in meanings.items() if what is None]
        left_out = f"; rows with {', '.join(unknown)} are left out" if unknown else ""
        if key == "label_values" and len({*meanings.values()} - {None}) == 1:
            kind = "good" if True in meanings.values() else "bad"
            notes.append(f"all of these rows are {kind} ones, and kto needs both; sft trains on good ones alone")
        notes += [f"{key}: in {form[column]!r}, {', '.join(known)}{left_out}"] if meanings else []
    return notes


def _ask_values(table: Table, name: str, kind: str, known: Mapping[str, str]) -> str:
    """Return the question what the values of a column stand for, with the command that answers it."""
    meanings = ("answer_a", "answer_b") if kind == "preference" else ("true", "false")
    values = [value for value in table.values(name) if value]
    if len(values) > MOST_MARKS:
        return f"{name!r} holds {len(values)} different values; write {' or '.join(meanings)} in its place."
    given = shlex.quote(assigned(_ratings(name, table) or values, "?"))
    command = table.ask_for(kind, known, f" --values {given}")
    what = f"Say what its values stand for, with {' or '.join(meanings)} for each `?`"
    return f"{what}; leave out those that are neither, and their rows are left out: {command}"


def _check_values(table: Table, name: str) -> None:
    if unknown := [value for value in table.meanings if value not in table.values(name)]:
        raise UserError(f"--values {unknown[0]}=...: {name!r} holds {', '.join(map(repr, table.values(name)))}.")


def is_label(value: Any) -> bool:
    """Return whether training reads a value as true or false."""
    try:
        Row(label=value).flag("label")
    except RowError:
        return False
    return True


def is_rating(name: str, table: Table) -> bool:
    """Return whether a column holds numbers that grade rows; cells may be empty."""
    is_named = "rating" in words_of(name) or any(word in name.lower() for word in RATED)
    ratings = _ratings(name, table)
    return bool(ratings) and (is_named or (_low_is_good(name) and len(ratings) <= MOST_MARKS))


def _low_is_good(name: str) -> bool:
    """Return whether a column is named for marks or places, of which 1 is the best."""
    return any(word in name.lower() for word in RANKED)


def _ratings(name: str, table: Table) -> list[str]:
    """Return the different numbers in a column, the lowest first; nothing where it holds words too."""
    values = [value for value in table.values(name) if value.lower() not in UNRATED]
    is_number = all(re.fullmatch(r"-?\d*[.,]?\d+|\d+\.", value) for value in values)
    return sorted(values, key=number_in) if is_number else []


def _middle(ratings: Sequence[str]) -> float:
    return (number_in(ratings[0]) + number_in(ratings[-1])) / 2


def _is_good(rating: str, name: str, ratings: Sequence[str]) -> bool:
    """Return whether a rating is in the better half of those that there are."""
    middle = _middle(ratings)
    return number_in(rating) < middle if _low_is_good(name) else number_in(rating) > middle


def labels_in_words(table: Table) -> tuple[str, list[str]] | None:
    """Return a column that marks rows by words other than true and false, with its values, the good one first."""
    name = table.roles("labelled").get("label")
    cells = [row.get(name) for row in table.rows] if name else []
    if name is None or all(is_label(value) for value in cells):
        return None
    if is_rating(name, table):  # which says nothing of good and bad, unless its user does
        return (name, table.values(name)) if table.meanings else None
    if not all(value is None or isinstance(value, str | int | float) for value in cells):
        return None
    texts = table.values(name)
    is_mark = len(texts) > 1 or texts[0].lower() in (*GOOD, *BAD)
    known = sum(text.lower() in (*GOOD, *BAD) for text in texts)
    most = len(texts) if table.meanings else MOST_MARKS if known > 1 else FEW
    if not is_mark or len(texts) > most or len(texts) == len(cells) > 2 or any(len(text) > SHORT for text in texts):
        return None
    return name, sorted(
        texts, key=lambda text: 0 if text.lower() in GOOD else 2 if text.lower() in BAD or not text else 1
    )


def _good_and_bad(table: Table, values: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the values that mark good and bad rows; None where that is not sure."""
    if table.meanings:
        good, bad = ([value for value in values if table.meanings.get(value) == one] for one in ("true", "false"))
        return good, bad
    good, bad = ([value for value in values if value.lower() in words] for words in (GOOD, BAD))
    is_sure = (good and bad) or len(good) + len(bad) == len([value for value in values if value])
    return (good, bad) if is_sure else None


def _marked_lines(name: str, values: Sequence[str], good: Sequence[str], bad: Sequence[str]) -> list[str]:
    """Return the line that leaves out rows that are neither good nor bad, if there are any."""
    left_out = [repr(value) if value else "no mark" for value in values if value not in (*good, *bad)]
    if not left_out:
        return []
    return [f"rows = rows[rows[{name!r}].str.strip().isin({[*good, *bad]})]   # left out: {', '.join(left_out)}"]


def label_problem(table: Table, name: str, values: Sequence[str]) -> str | None:
    """Return what has to be said of labels in words before they can be read; None where all is known."""
    held = " and ".join(repr(value) if value else "nothing" for value in values)
    problem = f"{table.file}: {name!r} holds {held}; kto learns from good and bad rows, marked true or false"
    if _good_and_bad(table, values) is None:
        return f"{problem}. {_ask_values(table, name, 'labelled', {})}"
    if len(table.roles("labelled")) < 3:
        return f"{problem}. Name the columns of prompts and answers: {table.ask_for('labelled')}"
    _check_values(table, name)
    return None


def _label_values(table: Table, values: Sequence[str]) -> dict[str, bool | None]:
    """Return true for the words of good rows, false for those of bad ones, None for others."""
    good, bad = _good_and_bad(table, values) or ([], [])
    return {value: True if value in good else False if value in bad else None for value in values}


def _filtered_by(condition: str, written: str | None) -> str:
    """Return how a filter keeps the rows of a condition: a new one, or another line in the one that was written."""
    if written is not None:
        module, _, function = written.rpartition(".")
        return f"write `if not ({condition}): return False` before the `return` of `{function}` in {module}.py"
    return f"`filter: mine.good` in the entry, with `def good(row): return {condition}` in mine.py"


def label_advice(name: str, values: Sequence[str], written: str | None) -> str:
    """Return what sft does with rows that are marked by words, and how good ones are kept; `written`: the filter."""
    kept = [value for value in values if value.lower() in GOOD] or [value for value in values if value][:1]
    remedy = _filtered_by(f"str(row[{name!r}]).strip() in {kept}", written)
    held = ", ".join(map(repr, values))
    return f"all rows are trained on, whatever {name!r} holds: {held}. To train on some of them only: {remedy}"


def rating_advice(name: str, table: Table, written: str | None) -> str:
    """Return what a column of ratings is good for; `written`: the filter that the entry has."""
    ratings = _ratings(name, table)
    good_ones = [one for one in ratings if _is_good(one, name, ratings)] or ratings
    bound, unset = (f"<= {good_ones[-1]}", "'inf'") if _low_is_good(name) else (f">= {good_ones[0]}", "0")
    unrated = [value for value in table.values(name) if value and value not in ratings]
    rated = f"row[{name!r}] not in {unrated} and " if unrated else ""
    cell = f"row[{name!r}] or {unset}"
    if any("," in one for one in ratings):  # decimal commas
        cell, bound = f"str({cell}).replace(',', '.')", bound.replace(",", ".")
    good = f"{rated}float({cell}) {bound}"
    return (
        f"{name!r} holds ratings, and sft trains on all rows, also on badly rated ones. To train on good rows only: "
        f"{_filtered_by(good, written)}. kto learns from good and bad ones: "
        f"{_ask_ratings(name, table)}. Rows of one prompt with a high and a low rating make pairs for dpo"
    )


def ratings_to_name(table: Table) -> str | None:
    """Return how a column of ratings becomes labels; None where there is none."""
    name = next((one for one in table.columns if is_rating(one, table)), None)
    if name is None:
        return None
    return f"{name!r} holds ratings; say which are good and which bad: {_ask_ratings(name, table)}"


def _ask_ratings(name: str, table: Table) -> str:
    """Return the command that says which ratings are good and which bad."""
    given = shlex.quote(_halves(name, table))
    return table.ask_for("labelled", {"label": name}, f" --values {given}").removesuffix("`") + " --method kto`"


def _halves(name: str, table: Table) -> str:
    """Return which ratings are likely good and bad, as `--values` takes it: the upper and the lower half of them."""
    values = _ratings(name, table)
    middle = _middle(values)
    if len(values) > MOST_MARKS:
        return f"{middle:g}"
    graded = [one for one in values if number_in(one) != middle]
    return (";" if any("," in one for one in graded) else ",").join(
        f"{one}={str(_is_good(one, name, values)).lower()}" for one in graded
    )


def ratings_without_meaning(table: Table) -> tuple[str, str] | None:
    """Return a column of ratings whose good ones nobody has named, with those that likely are; None without one."""
    name = table.roles("labelled").get("label") or next((one for one in table.columns if is_rating(one, table)), None)
    if name is None or table.meanings or table.good_from is not None or not is_rating(name, table):
        return None
    is_read = all(is_label(row.get(name)) for row in table.rows)
    return None if is_read else (name, _halves(name, table))


def label_values(table: Table) -> dict[str, bool | None]:
    """Return what the labels for kto stand for; nothing where they are true and false, a UserError where unsure."""
    column_of = table.roles("labelled")
    name = column_of.get("label")
    if name is None or "completion" not in column_of or {"chosen", "rejected"} <= set(table.columns):
        return {}  # pairs, or columns that are missing
    if table.good_from is not None:
        if not _ratings(name, table):
            held = ", ".join(map(repr, table.values(name)[:FEW]))
            raise UserError(f"--values {table.good_from:g}: {name!r} holds no ratings, but {held}.")
        return {}
    if (words := labels_in_words(table)) is not None:
        if (problem := label_problem(table, *words)) is not None:
            raise UserError(problem)
        return _label_values(table, words[1])
    for number, row in enumerate(table.rows):
        if not is_label(row.get(name)):
            advice = f" {_ask_values(table, name, 'labelled', {})}"
            if is_rating(name, table):
                advice = f" It holds ratings; say which are good and which bad: {_ask_ratings(name, table)}"
            problem = f"kto needs true or false in {name!r}, and row {number} has {row.get(name)!r}"
            raise UserError(f"{table.file}: {problem}.{advice}")
    return {}


def pairing_advice(table: Table) -> str | None:
    """Return how rows with one answer each become pairs, by their ratings or labels; None where they have two."""
    if (scored := scored_answers_advice(table)) is not None:
        return scored
    column_of, marked = table.roles("labelled"), labels_in_words(table)
    answer, name = column_of.get("completion"), column_of.get("label")
    name = next((one for one in table.columns if is_rating(one, table)), name)
    if answer is None or {"chosen", "rejected"} & table.roles("pairs").keys() - {name}:
        return None
    one_answer = f"rows have one answer, {answer!r}, and pairs need a better and a worse one of the same prompt"
    rated = name is not None and is_rating(name, table)
    readable = rated or marked or (name is not None and all(is_label(row.get(name)) for row in table.rows))
    if name is None or not readable or "prompt" not in column_of:
        return f"{one_answer}: write both into a row, as prompt, chosen and rejected; sft trains on rows as they are."
    lines, order = [f"rows = rows[rows[{answer!r}] != '']"], "lambda marks: marks.str.lower().isin(['true', '1'])"
    if rated:
        lines += [f"rows = rows[pandas.to_numeric(rows[{name!r}], errors='coerce').notna()]   # those with a rating"]
        order = "pandas.to_numeric"
    elif marked is not None:
        if (marks := _good_and_bad(table, marked[1])) is None:
            return f"{one_answer}. {_ask_values(table, name, 'labelled', {})}"
        lines += _marked_lines(*marked, *marks)
        order = f"lambda marks: marks.str.strip().isin({marks[0]})"
    lines += [
        f"rows = rows.sort_values({name!r}, key={order}, ascending=False)",
        f"of_prompt = rows.groupby({column_of['prompt']!r})",
        "best, worst = of_prompt.first(), of_prompt.last()",
        f"pairs = best.assign(chosen=best[{answer!r}], rejected=worst[{answer!r}])[best[{name!r}] != worst[{name!r}]]",
        "pairs = pairs[['chosen', 'rejected']].rename_axis('prompt').reset_index()",
    ]
    return f"{one_answer}. Pair rows of one prompt by {name!r}:\n{_recipe(table.file, name, lines)}"


def scored_answers_advice(table: Table) -> str | None:
    """Return how rows with two answers and a rating of each become pairs; None for others."""
    prompt = table.roles("prompts").get("prompt")
    ratings = {_end(name): name for name in table.columns if is_rating(name, table)}
    others = [name for name in table.columns if name not in (prompt, *ratings.values())]
    answers = [name for name in others if set(ANSWERED) & set(words_of(name))]
    scored = [(name, ratings[end]) for name in answers if (end := _end(name)) in ratings]
    if prompt is None or len(scored) != 2 or scored[0][1] == scored[1][1]:
        return None
    (one, its_rating), (other, other_rating) = scored
    lines = [
        f"marks = rows[[{its_rating!r}, {other_rating!r}]].replace(',', '.', regex=True)",
        "first, second = marks.apply(pandas.to_numeric, errors='coerce').T.values",
        f"chosen = rows[{one!r}].where(first > second, rows[{other!r}])",
        f"rejected = rows[{other!r}].where(first > second, rows[{one!r}])",
        f"pairs = rows[[{prompt!r}]].set_axis(['prompt'], axis=1).assign(chosen=chosen, rejected=rejected)",
        "pairs = pairs[(first > second) | (first < second)]   # left out: equal ratings, and none",
    ]
    problem = f"{its_rating!r} and {other_rating!r} rate {one!r} and {other!r}"
    return f"{problem}. Make pairs of the better and the worse one, for dpo:\n{_recipe(table.file, its_rating, lines)}"


def _end(name: str) -> str:
    """Return the last word or number of a column's name."""
    return plain(name).rpartition(" ")[2]


def second_answer_advice(table: Table) -> str:
    """Return the question whether rows with two texts that may be answers are pairs; nothing where they have one."""
    column_of = table.roles("text")
    for name in table.columns:
        is_answer = name not in column_of.values() and set(ANSWERED) & set(words_of(name))
        if len(column_of) == 2 and is_answer and name in table.texts():
            first = column_of["output"]
            return f". Is one of {first!r} and {name!r} the better answer? Then name them chosen and rejected, for dpo"
    return ""


def _recipe(file: Path, column: str, lines: Sequence[str]) -> str:
    """Return lines of Python that read a file, with the values of a column as text, and write another of pairs."""
    plain = file.with_suffix("") if file.suffix == ".gz" else file
    target = f"{plain.stem}-pairs.csv"
    read = f"rows = pandas.read_json({str(file)!r}, lines={plain.suffix != '.json'})"
    if plain.suffix in (".csv", ".tsv"):
        with file.open(encoding="utf-8-sig", errors="replace") as opened:
            separator = csv_separator(file, opened.readline())
        read = f"rows = pandas.read_csv({str(file)!r}, dtype=str, keep_default_na=False, sep={separator!r})"
    elif plain.suffix == ".parquet":
        read = f"rows = pandas.read_parquet({str(file)!r})"
    as_text = [] if "read_csv" in read else [f"rows[{column!r}] = rows[{column!r}].astype(str)"]
    code = ["import pandas", read, *as_text, *lines, f"pairs.to_csv({target!r}, index=False)"]
    return "\n".join(f"    {line}" for line in code) + f"\nThen: upweight new {target}"
