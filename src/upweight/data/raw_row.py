"""Reading one raw row: every wrong value becomes a RowError that names its key."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
LARGEST = sys.float_info.max
DEEPEST = 64
OWN_COLUMNS = ("prompt", "prompt_ids")  # of a prepared prompt; its others are the user's


class RowError(Exception):
    """A row that cannot be used: the key, and what was expected there."""

    def __init__(self, key: str, expected: str) -> None:
        super().__init__(f"'{key}': expected {expected}")
        self.key = key
        self.expected = expected


@dataclass
class Record:
    """One prepared row: its text for people, its columns for training."""

    text: dict[str, Any]
    columns: dict[str, Any]
    pinned: int = 0  # leading tokens that truncation keeps: 1 where the sequence begins with BOS


def lookup(row: Row, key: str) -> Any:
    """The value at `key`, where dots reach into nested columns; None where there is nothing."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def has(row: Row, key: str) -> bool:
    """Whether a row has a value at `key`."""
    return lookup(row, key) is not None


def found(value: Any) -> str:
    """A value in words, for messages about what was found in its place."""
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
    """`value` if it is valid text, else a RowError."""
    if not isinstance(value, str) or (not value and not empty):
        raise RowError(key, f"text, found {found(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(key, f"valid unicode, found half a surrogate pair at character {error.start}") from error
    return value


def text_at(row: Row, key: str) -> str:
    """The text at `key`; it must be there and not be empty."""
    return checked_text(lookup(row, key), key)


def optional_text(row: Row, key: str) -> str:
    """The text at `key`, empty where there is none."""
    value = lookup(row, key)
    return "" if value is None else checked_text(value, key, empty=True)


def first_of(row: Row, keys: Iterable[str]) -> str:
    """The first of `keys` that the row has; an error that names them all where it has none."""
    keys = list(keys)
    for key in keys:
        if has(row, key):
            return key
    raise RowError(keys[0], f"text under {' or '.join(repr(key) for key in keys)}, found nothing")


def checked_list(value: Any, key: str, of: str) -> list[Any]:
    """`value` if it is a list with something in it, else a RowError."""
    if not isinstance(value, list | tuple) or not value:
        raise RowError(key, f"a list of {of}, found {found(value)}")
    return list(value)


def flag_at(row: Row, key: str) -> bool:
    """The verdict at `key`: true or false, 1 or 0, or these as text."""
    value = lookup(row, key)
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
        return value.strip().lower() in ("true", "1")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise RowError(key, f"true or false, found {found(value)}")


def optional_number(row: Row, key: str) -> float | None:
    """The finite number at `key`, as such or as text; None where there is none."""
    value = lookup(row, key)
    if value is None or value == "":
        return None
    if isinstance(value, str):  # as every cell of a CSV is
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise RowError(key, f"a finite number, found {found(value)}")
    return float(value)


def id_list(row: Row, key: str) -> list[int]:
    """The token ids at `key`."""
    values = checked_list(lookup(row, key), key, "token ids")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RowError(key, f"token ids, found {found(value)}")
    return values


def label_list(row: Row, size: int) -> list[int]:
    """The labels of `size` tokens, -100 where a token has none."""
    labels = checked_list(lookup(row, "labels"), "labels", "labels")
    if len(labels) != size:
        raise RowError("labels", f"one label for each of the {size} tokens, found {len(labels)}")
    for label in labels:
        if isinstance(label, bool) or not isinstance(label, int):
            raise RowError("labels", f"whole numbers, found {found(label)}")
    return labels


def check_all_text(value: Any, key: str, depth: int = 0) -> None:
    """A RowError if any text inside `value` is not valid unicode, or if it is nested beyond use."""
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
    """Length of the common beginning of two texts or lists."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(number for number in range(length) if first[number] != second[number])


def common_start(sequences: Sequence[Sequence[Any]]) -> list[Any]:
    """What all of some sequences begin with."""
    first = sequences[0]
    return list(first[: min(common_length(first, other) for other in sequences)])
