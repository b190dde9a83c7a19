"""Reads values of one raw row; every wrong value becomes a RowError that names its key."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the list of commands imports this file, and not the keys of a config
    from upweight.config.sections.data import UserFormat

MAX_FLOAT = sys.float_info.max
MAX_NESTING = 64
NO_TEXT = "text, got an empty text"
MAX_SHOWN = 30  # characters of a text that a message repeats
TURNS = ("prompt", "chosen", "rejected", "completion")  # columns whose text may hold messages
MESSAGES_IN_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content)\1\s*:""")
# Columns that preparation adds to a prompt; all others come from the user's row.
PREPARED_COLUMNS = ("prompt", "prompt_ids", "teacher_prompt_ids")


class RowError(Exception):
    """The error for a row that cannot be used; it holds the key and what was expected there."""

    def __init__(self, key: str, expected: str) -> None:
        super().__init__(f"'{key}': expected {expected}")
        self.key, self.expected = key, expected


@dataclass
class Record:
    """One prepared row: the text that `preprocess --show` prints, and the columns that training reads."""

    text: dict[str, Any]
    columns: dict[str, Any]
    pinned: int = 0  # leading tokens that truncation of the prompt keeps: 1 where it begins with BOS


class Row(dict[str, Any]):
    """A raw row; dots in a key address nested columns."""

    def value(self, key: str) -> Any:
        """Return the value at `key`, or None."""
        if key in self:
            return self[key]
        value: Any = self
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def has(self, key: str) -> bool:
        """Return whether there is a value other than None at `key`."""
        return self.value(key) is not None

    def first_of(self, first: str, *others: str) -> str:
        """Return the first key that has a value; raise a RowError that names them all if none has."""
        key = next((key for key in (first, *others) if self.has(key)), None)
        if key is None and others:
            raise RowError(first, f"text under {' or '.join(map(repr, (first, *others)))}, got nothing")
        return key or first  # reading the only one raises the error

    def text(self, key: str) -> str:
        """Return the text at `key`; raise a RowError if it is missing or empty."""
        return checked_text(self.value(key), key)

    def optional_text(self, key: str) -> str:
        """Return the text at `key`, or an empty text if there is none."""
        value = self.value(key)
        return "" if value is None else checked_text(value, key, empty=True)

    def list_at(self, key: str, items: str) -> list[Any]:
        """Return the list at `key`; raise a RowError if it is missing or empty."""
        return checked_list(self.value(key), key, items)

    def flag(self, key: str) -> bool:
        """Return the boolean at `key`, written as true or false, 1 or 0, or these as text."""
        value = self.value(key)
        if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
            return value.strip().lower() in ("true", "1")
        if isinstance(value, bool | int | float) and value in (0, 1):
            return bool(value)
        shown = repr(value) if isinstance(value, str) and 0 < len(value) <= MAX_SHOWN else describe_value(value)
        raise RowError(key, f"true or false, got {shown}")

    def optional_number(self, key: str) -> float | None:
        """Return the finite number at `key`, also if it is written as text, or None."""
        value = self.value(key)
        if value is None or (isinstance(value, str) and not value):
            return None
        if isinstance(value, str):  # every cell of a CSV file is text
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise RowError(key, f"a finite number, got {describe_value(value)}")
        return float(value)

    def token_ids(self, key: str) -> list[int]:
        """Return the token ids at `key`."""
        values = self.list_at(key, "token ids")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RowError(key, f"token ids, got {describe_value(value)}")
        return values

    def token_labels(self, size: int) -> list[int]:
        """Return the `labels` of `size` tokens; -100 marks a token without a label."""
        labels = self.list_at("labels", "labels")
        if len(labels) != size:
            raise RowError("labels", f"one label for each of the {size} tokens, got {len(labels)}")
        for label in labels:
            if isinstance(label, bool) or not isinstance(label, int):
                raise RowError("labels", f"whole numbers, got {describe_value(label)}")
        return labels


def read_label(row: Row, key: str) -> bool:
    """Return whether a row of KTO is a good one."""
    if not row.has(key):
        raise RowError(key, "true or false, as KTO learns from labelled completions, or pairs: 'chosen', 'rejected'")
    try:
        return row.flag(key)
    except RowError as error:
        remedy = "in a config, `type: {label_values: {good: true, bad: false}}` of the entry says what words mean"
        raise RowError(key, f"{error.expected}; {remedy}; in a script, map them to True and False") from None


def word_of(value: Any) -> str:
    """Return the text of a cell that marks a row or an answer."""
    return "" if value is None else str(value).strip()


def marked(form: "UserFormat", row: Row) -> Row | None:
    """Return a row with true or false for its label, and its two answers as chosen and rejected; None: left out."""
    read = copy(row)
    if form.label_values:
        label = _meaning(row, form.field_label, form.label_values, "label_values")
        if label is None:
            return None
        read[form.field_label] = label
    if form.label_from is not None:
        rating = _rating(row.value(form.field_label))
        if rating is None:
            return None
        read[form.field_label] = rating >= form.label_from
    if form.field_winner is not None:
        better = _meaning(row, form.field_winner, form.winner_values, "winner_values")
        if better is None:
            return None
        (worse,) = {column for column in form.winner_values.values() if column not in (None, better)}
        for role, column in ((form.field_chosen, better), (form.field_rejected, worse)):
            if row.value(column) in (None, ""):
                raise RowError(str(column), f"an answer, got {describe_value(row.value(column))}")
            read[role] = row.value(column)
        if form.field_completion not in (form.field_chosen, form.field_rejected):
            read.pop(form.field_completion, None)  # one of two answers; KTO would read it alone
    return read


def _rating(value: Any) -> float | None:
    """Return the number in a cell; None where it holds none."""
    try:
        rating = number_in(word_of(value))
    except ValueError:
        return None
    return rating if isfinite(rating) else None


def with_messages(form: "UserFormat", row: Row) -> Row:
    """Return a row with messages where its prompts or answers are JSON text of messages, as in a CSV."""
    fields = (form.field_prompt, form.field_chosen, form.field_rejected, form.field_completion)
    read = copy(row)
    for key in {*TURNS, *fields, *form.winner_values.values()}:
        text = row.get(key)
        if key is None or not isinstance(text, str) or not (start := MESSAGES_IN_TEXT.match(text)):
            continue
        if start[1] == "'":
            raise RowError(key, "messages as JSON text, got them as Python prints a list: write them by `json.dumps`")
        with suppress(ValueError, RecursionError):
            messages = json.loads(text)
            if all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
                read[key] = messages
    return read


def number_in(word: str) -> float:
    """Return the number that a word is, also with a decimal comma."""
    return float(word.replace(",", ".") if "." not in word else word)


def _meaning(row: Row, column: str, meanings: Mapping[str, Any], key: str) -> Any:
    """Return what the word in a column stands for."""
    word = word_of(row.value(column))
    if word not in meanings:
        known = ", ".join(map(repr, meanings))
        shown = repr(word) if 0 < len(word) <= MAX_SHOWN else describe_value(word)
        remedy = f"`{key}` of the entry's `type` says what a word stands for; null leaves its rows out"
        raise RowError(column, f"{known}, got {shown}; {remedy}")
    return meanings[word]


def describe_value(value: Any) -> str:
    """Return the type of a value in words, for error messages."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return "an empty text" if not value else "text"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "an empty list" if not value else "a list"
    return f"a {type(value).__name__}"


def checked_text(value: Any, key: str, *, empty: bool = False) -> str:
    """Return `value` if it is valid text, else raise a RowError."""
    if not isinstance(value, str) or (not value and not empty):
        raise RowError(key, f"text, got {describe_value(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(key, f"valid unicode, got half a surrogate pair at character {error.start}") from error
    return value


def checked_list(value: Any, key: str, items: str) -> list[Any]:
    """Return `value` if it is a non-empty list, else raise a RowError."""
    if not isinstance(value, list | tuple) or not value:
        raise RowError(key, f"a list of {items}, got {describe_value(value)}")
    return list(value)


def checked_mappings(value: Any, key: str, one: str, several: str) -> list[Mapping[str, Any]]:
    """Return `value` if it is a non-empty list of mappings, else raise a RowError."""
    mappings = checked_list(value, key, several)
    for number, item in enumerate(mappings):
        if not isinstance(item, Mapping):
            raise RowError(f"{key}[{number}]", f"{one}, got {describe_value(item)}")
    return mappings


def check_all_text(value: Any, key: str, depth: int = 0) -> None:
    """Raise a RowError if any text inside `value` is not valid unicode, or if it is nested too deeply."""
    if depth > MAX_NESTING:
        raise RowError(key[:80], f"at most {MAX_NESTING} levels of nesting")
    if isinstance(value, str):
        checked_text(value, key, empty=True)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            check_all_text(name, key, depth + 1)
            check_all_text(inner, f"{key}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            check_all_text(inner, f"{key}[{number}]", depth + 1)


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or lists."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(number for number in range(length) if first[number] != second[number])


def common_start(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the longest common prefix of some sequences."""
    first = sequences[0]
    return list(first[: min(common_length(first, sequence) for sequence in sequences)])
