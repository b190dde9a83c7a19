"""Reads values of one raw row; every wrong value becomes a RowError that names its key."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

RawRow = Mapping[str, Any]
LARGEST = sys.float_info.max
DEEPEST = 64
PREPARED_COLUMNS = (
    "prompt",
    "prompt_ids",
)  # columns that preparation adds to a prompt; all others come from the user's row


class RowError(Exception):
    """The error for a row that cannot be used; it holds the key and what was expected there."""

    def __init__(self, key: str, expected: str) -> None:
        super().__init__(f"'{key}': expected {expected}")
        self.key = key
        self.expected = expected


@dataclass
class Record:
    """One prepared row: the text that `preprocess --show` prints, and the columns that training reads."""

    text: dict[str, Any]
    columns: dict[str, Any]
    pinned: int = 0  # leading tokens that truncation keeps: 1 where the sequence begins with BOS


def lookup(row: RawRow, key: str) -> Any:
    """Return the value at `key`, where dots address nested columns, or None."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def has(row: RawRow, key: str) -> bool:
    """Return whether a row has a value other than None at `key`."""
    return lookup(row, key) is not None


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


def text_at(row: RawRow, key: str) -> str:
    """Return the text at `key`; raise a RowError if it is missing or empty."""
    return checked_text(lookup(row, key), key)


def optional_text(row: RawRow, key: str) -> str:
    """Return the text at `key`, or an empty text if the row has none."""
    value = lookup(row, key)
    return "" if value is None else checked_text(value, key, empty=True)


def first_of(row: RawRow, keys: Iterable[str]) -> str:
    """Return the first of `keys` that the row has; raise a RowError that names them all if it has none."""
    keys = list(keys)
    for key in keys:
        if has(row, key):
            return key
    raise RowError(keys[0], f"text under {' or '.join(repr(key) for key in keys)}, got nothing")


def checked_list(value: Any, key: str, of: str) -> list[Any]:
    """Return `value` if it is a non-empty list, else raise a RowError."""
    if not isinstance(value, list | tuple) or not value:
        raise RowError(key, f"a list of {of}, got {describe_value(value)}")
    return list(value)


def flag_at(row: RawRow, key: str) -> bool:
    """Return the boolean at `key`, written as true or false, 1 or 0, or these as text."""
    value = lookup(row, key)
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
        return value.strip().lower() in ("true", "1")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise RowError(key, f"true or false, got {describe_value(value)}")


def optional_number(row: RawRow, key: str) -> float | None:
    """Return the finite number at `key`, also if it is written as text, or None."""
    value = lookup(row, key)
    if value is None or value == "":
        return None
    if isinstance(value, str):  # every cell of a CSV file is text
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise RowError(key, f"a finite number, got {describe_value(value)}")
    return float(value)


def id_list(row: RawRow, key: str) -> list[int]:
    """Return the token ids at `key`."""
    values = checked_list(lookup(row, key), key, "token ids")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RowError(key, f"token ids, got {describe_value(value)}")
    return values


def label_list(row: RawRow, size: int) -> list[int]:
    """Return the labels of `size` tokens; -100 marks a token without a label."""
    labels = checked_list(lookup(row, "labels"), "labels", "labels")
    if len(labels) != size:
        raise RowError("labels", f"one label for each of the {size} tokens, got {len(labels)}")
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int):
            raise RowError("labels", f"whole numbers, got {describe_value(label)}")
    return labels


def check_all_text(value: Any, key: str, depth: int = 0) -> None:
    """Raise a RowError if any text inside `value` is not valid unicode, or if it is nested too deeply."""
    if depth > DEEPEST:
        raise RowError(key[:80], f"at most {DEEPEST} levels of nesting")
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
