"""What can be said of a config's data without opening them: files that are missing, columns that cannot be read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from upweight.config import Config
from upweight.config.peers import FORMAT_NAMES
from upweight.config.rules.data import entries
from upweight.config.sections.data import DatasetSpec, UserFormat
from upweight.data.columns import PLAIN, ROLES, are_swapped, first_row, mapping_advice, misses_columns, surplus_cells
from upweight.data.raw_row import Row, RowError, marked, read_label
from upweight.data.sources.lookup import (
    FILE_KINDS,
    entry_name,
    existing,
    file_suffix,
    matches,
    missing_files,
    patterns_of,
)
from upweight.data.sources.raw_files import encoding_problem, workbook_problem
from upweight.errors import did_you_mean
from upweight.user_modules import is_path, problem_unrun

# What rows with a `type` need, by the kind of data: a column of each group. Types that are not listed are not judged.
_FIRST, _ANSWERS = ("prompt", "input", "question", "instruction"), (("chosen",), ("rejected",))
_EITHER = (("chosen", "chosen_response"), ("rejected", "rejected_response"))
_FAMILY = {
    "": (_FIRST, *_EITHER), ".default": (_FIRST, *_EITHER), ".prompt_pairs": (("prompt",), *_ANSWERS),
    ".intel": (("question",), *_ANSWERS), ".icr": (("input",), *_ANSWERS), ".ultra": (("prompt",), *_ANSWERS),
    ".argilla": (("instruction",), ("chosen_response",), ("rejected_response",)), ".argilla_chat": _ANSWERS,
}  # fmt: skip
_LABELLED = (("completion",), ("label",))
_LABELLED_FAMILY = {
    ".argilla": (("instruction",), *_LABELLED), ".argilla_chat": _LABELLED, ".intel": (("question",), *_LABELLED),
    ".prompt_pairs": (("prompt",), *_LABELLED), ".ultra": (("prompt",), *_LABELLED),
}  # fmt: skip
_CHAT, _ANY_CHAT = (("messages",),), (("messages", "conversations"),)
NEEDED: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "pairs": {
        **{f"{family}{name}": groups for family in ("chatml", "llama3") for name, groups in _FAMILY.items()},
        "chat_template": (*_CHAT, *_ANSWERS), "chat_template.default": (*_CHAT, *_ANSWERS),
        "chat_template.argilla": _ANSWERS, "chat_template.argilla_chat": _ANSWERS, "orpo.chat_template": _ANSWERS,
        "bradley_terry.chat_template": (("input",), *_ANSWERS), "zephyr.nectar": (("prompt",), ("answers",)),
    },
    "labelled": {
        **{f"{family}{name}": groups for family in ("chatml", "llama3") for name, groups in _LABELLED_FAMILY.items()},
        "chat_template": (*_CHAT, *_LABELLED), "chat_template.default": (*_CHAT, *_LABELLED),
    },
    "text": {
        "chat_template": _ANY_CHAT, "chat_template.default": _ANY_CHAT, "sharegpt": _ANY_CHAT,
        "alpaca": (("instruction",), ("output",)), "completion": (("text",),), "pretrain": (("text",),),
        "input_output": (("segments",),),
    },
    "prompts": {"chat_template": _CHAT, "chat_template.default": _CHAT},
    "steps": {"stepwise_supervised": (("completions", "input_ids"), ("labels",))},
}  # fmt: skip

FIRST_LINES = 1000  # of a file that are looked at
MOST_READERS = 4  # formats that a message names


def data_problems(config: Config) -> Iterator[str]:
    """Yield what would stop the data of a config from being read, by the names of files and their first rows."""
    for stage in config.stages or (config,):
        if stage.gym.enabled:  # whose files may lie in the Gym's folder
            continue
        for key, entry in entries(stage):
            missing = [f"{entry_name(entry, key)}: {problem}" for problem in missing_files(entry, stage.folder)]
            yield from missing or _unread_columns(stage, entry, key)
            yield from _missing_functions(stage, entry, key)


def _missing_functions(config: Config, entry: DatasetSpec, key: str) -> Iterator[str]:
    """Yield what stops the user's functions of an entry from being loaded, as far as their files say it."""
    formats = FORMAT_NAMES[config.method.formats()]
    for name, path in (("type", entry.type), ("filter", entry.filter)):
        if not isinstance(path, str) or path in formats or not is_path(path):
            continue
        if (problem := problem_unrun(path, config.folder)) is not None:
            yield f"{key}.{name}: {problem}"


def swapped_roles(config: Config) -> Iterator[str]:
    """Yield a warning for each dataset of pairs whose columns are named for each other's role."""
    for stage in config.stages or (config,):
        for key, entry in entries(stage):
            form = entry.type if isinstance(entry.type, UserFormat) else entry
            chosen, rejected = form.field_chosen or "chosen", form.field_rejected or "rejected"
            if are_swapped(chosen, rejected):
                named = f"the chosen answer is read from {chosen!r} and the rejected one from {rejected!r}"
                remedy = "exchange them, or go on if it is so"
                yield f"{entry_name(entry, key)}: {named}, whose names say the opposite: {remedy}"


def _unread_columns(config: Config, entry: DatasetSpec, key: str) -> Iterator[str]:
    """Yield what is amiss with the columns of the first row, which a selection or the user's code may change."""
    selects = "[" in (entry.split or "") or entry.shards or entry.ds_type not in (None, "json", "csv")
    if selects or type(config.method).read_row is not None:
        return
    local = existing(entry.path, config.folder)
    files = [local] if local and local.is_file() else []
    for pattern in patterns_of(entry)[:1]:
        files += map(Path, matches(pattern, local, config.folder)[0][:1])
    if files and (workbook := workbook_problem(files[0])):
        yield f"{entry_name(entry, key)}: {workbook}, and name that file"
        return
    is_csv = bool(files) and FILE_KINDS.get(file_suffix(files[0])) == "csv"
    if entry.filter and not is_csv:  # it may leave out the first row; those of a CSV have the same columns
        return
    row = first_row(files[0]) if files else None
    if files and row is None and FILE_KINDS.get(file_suffix(files[0])) in ("json", "csv"):
        yield from (f"{entry_name(entry, key)}: {one}" for one in [encoding_problem(files[0], FIRST_LINES)] if one)
    kind = config.method.formats()
    problem = None
    if row is not None and (surplus := surplus_cells(row)) is not None:
        problem = f"row 0 {surplus}"
    elif row is not None:
        problem = missing_columns(kind, entry, row) or (None if entry.filter else _unread_label(kind, entry, row))
    if problem is not None:
        yield f"{entry_name(entry, key)}: {problem}"


def _unread_label(kind: str, entry: DatasetSpec, row: Mapping[str, Any]) -> str | None:
    """Return why the label of a first row cannot be read; None where it can, and where a format reads it otherwise."""
    form = entry.type or UserFormat()
    if not isinstance(form, UserFormat):
        return None
    try:
        read = marked(form, Row(row))
        if read is not None and kind == "labelled" and _has(read, form.field_completion):
            read_label(read, form.field_label)
    except RowError as error:
        return f"row 0, {error}"
    return None


def missing_columns(kind: str, entry: DatasetSpec, row: Mapping[str, Any]) -> str | None:
    """Return which columns an entry needs that its first row has not, and the mapping to paste; None where it reads."""
    if isinstance(entry.type, UserFormat):
        fields = {role: str(getattr(entry.type, f"field_{role}")) for role in ROLES.get(kind, ())}
        if entry.type.field_winner is not None:
            answers = {f"winner_values.{word}": column for word, column in entry.type.winner_values.items() if column}
            fields = {"field_prompt": entry.type.field_prompt, "field_winner": entry.type.field_winner, **answers}
            return _gone(fields, row)
        paired = {role: str(getattr(entry.type, f"field_{role}")) for role in ROLES["pairs"]}
        if kind == "labelled" and not set(paired.values()) - row.keys():
            return None
        return _gone({f"field_{role}": column for role, column in fields.items()}, row)
    if entry.type is None:
        named = {entry.field_messages, entry.field} - {None}  # of rows whose columns have other names
        if not misses_columns(kind, [*row, *("text" for name in named if _has(row, str(name)))]):
            return None
        mapping = mapping_advice(kind, row)
        remedy = f"Add to it: {mapping}" if mapping else "`type` maps columns of other names (upweight docs formats)"
        wanted = " or ".join(" and ".join(names) for names in PLAIN[kind])
        return f"the columns are {', '.join(row)}; rows without a `type` need {wanted}. {remedy}"
    renamed = {"messages": entry.field_messages, "chosen": entry.field_chosen, "rejected": entry.field_rejected}
    renamed |= {"text": entry.text_column if entry.type == "pretrain" else entry.field}
    if (
        kind == "labelled"
        and "completion" not in row
        and ({entry.field_rejected or "rejected", "rejected_response"} & row.keys())
    ):
        kind = "pairs"  # which become two rows each
    for group in NEEDED.get(kind, {}).get(entry.type, ()):
        columns = [renamed[group[0]] or ""] if renamed.get(group[0]) else group
        if not any(_has(row, column) for column in columns):
            wanted = f"'type: {entry.type}' needs a column {' or '.join(columns)}, and there are {', '.join(row)}."
            return f"{wanted}{did_you_mean(columns[0], row) or _readers(kind, row)}"
    return None


def _readers(kind: str, row: Mapping[str, Any]) -> str:
    """Return the remedy for a row that a `type` cannot read: formats that read its columns, or keys that map them."""
    if not misses_columns(kind, row):
        return " Without a `type` they are read as they are."
    groups = NEEDED.get(kind, {}).items()
    fitting = [name for name, needed in groups if all(any(column in row for column in group) for group in needed)]
    if readers := [f"'type: {name}'" for name in fitting if not name.endswith(".default")]:
        return f" They are read by {' or '.join(readers[:MOST_READERS])}."
    mapping = mapping_advice(kind, row)
    return f" In its place: {mapping}" if mapping else " `type` maps columns of other names (upweight docs formats)."


def _gone(fields: Mapping[str, str], row: Mapping[str, Any]) -> str | None:
    """Return which columns that keys of a mapping name are not in a row."""
    gone = [f"'{column}' ({key})" for key, column in fields.items() if not _has(row, column)]
    near = "".join(did_you_mean(column, row) for column in fields.values() if not _has(row, column))
    return f"{' and '.join(gone)} of `type`: there is no such column, but {', '.join(row)}.{near}" if gone else None


def _has(row: Mapping[str, Any], column: str) -> bool:
    """Return whether a row has a column; dots reach into nested ones, which are not looked at."""
    return column in row or column.partition(".")[0] in row
