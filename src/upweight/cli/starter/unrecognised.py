"""Files of which no column is recognised: what their cells look like, and how they can be read."""

import json
import re
from contextlib import suppress
from typing import Any

from upweight.cli.starter.table import SHORT, Table
from upweight.errors import UserError

SPEAKER = re.compile(r"^[ \t]*([^\W\d][\w ]{0,20}):[ \t]", re.MULTILINE)  # at the beginning of a turn


class UnknownColumns(UserError):
    """No column is recognised, and the user can say which are meant."""


def unrecognised(table: Table) -> UserError:
    """Return the error about a file of which no column is recognised, with the remedy that its cells call for."""
    columns, first = table.columns, table.rows[0] if table.rows else {}
    known = "prompt with chosen and rejected, completion and label, completion, or messages"
    problem = f"no column is recognised among {', '.join(columns)}. Expected {known} (upweight docs formats)"
    if talk := next((name for name in columns if _is_conversation(first.get(name))), None):
        entry = f"datasets: [{{path: {table.file}, type: chat_template, field_messages: {talk}}}]"
        remedy = f"{talk!r} holds conversations: call that column `messages` in the file, or write a config with"
        return UserError(f"{problem}. {remedy} `{entry}`.")
    for name in columns:
        if len(speakers := list(dict.fromkeys(SPEAKER.findall(str(first.get(name) or ""))))) > 1:
            transcript = f"{name!r} holds conversations as text, of {' and '.join(map(repr, speakers[:3]))}"
            remedy = "`type: mine.transform` in a config makes messages of them, by a function of yours in mine.py"
            return UserError(f"{problem}. {transcript}: {remedy} (`upweight docs formats` has such a function).")
    if _lacks_names(table):
        problem += ". Line 1 seems to be a row: put a line of names before it, such as `prompt,completion`"
    return UnknownColumns(
        f"{problem}. If your columns have other names, say which they are: {table.ask_for(table.likely_kind())}"
    )


def _is_conversation(value: Any) -> bool:
    """Return whether a cell holds a list of messages, or JSON text of one."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ({"role", "content"} <= first.keys() or {"from", "value"} <= first.keys())


def _lacks_names(table: Table) -> bool:
    """Return whether the names of a CSV's columns of text read like texts themselves."""
    texts = table.texts() if {".csv", ".tsv"} & set(table.file.suffixes) else []
    return bool(texts) and all(" " in name and (name[-1] in ".?!" or len(name) > SHORT) for name in texts)
