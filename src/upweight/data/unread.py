"""Refuses columns that an entry of `datasets` names although its format does not read them."""

from typing import Any

from upweight.config.sections.data import UserFormat
from upweight.data.chunks import EncodeJob
from upweight.data.raw_row import RowError
from upweight.errors import UserError

NAMING = ("field_messages", "field_chosen", "field_rejected", "field_system", "field_tools", "field")


class TrackedRow(dict[str, Any]):
    """A row that records which of its columns are read."""

    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def refuse_unread(job: EncodeJob) -> None:
    """Raise a UserError if an entry names a column that its first row has and its format does not read."""
    encoder = job.encoder
    if encoder.transform is not None or not len(job.rows):  # a transform may read any column
        return
    row, entry = TrackedRow(job.rows.take(0, 1)[0]), encoder.setup.entry
    try:
        encoder.read(encoder.setup, row)
    except RowError:
        return  # preparing the row raises the error with its place
    named = {key: getattr(entry, key) for key in NAMING}
    kind = f"'type: {entry.type}'" if entry.type else "rows without a 'type'"
    if isinstance(entry.type, UserFormat):
        named |= {f"type.{key}": getattr(entry.type, key) for key in entry.type.model_fields_set if "field_" in key}
        kind = f"a mapping of columns for {encoder.setup.method.name}"
    for key, column in named.items():
        root = column.split(".")[0] if column and column not in row else column
        if root in row and root not in row.read and row.get(root) is not None:
            raise UserError(
                f"{job.where}, {job.rows.place(0)}: '{key}: {column}' has no effect: {kind} does not read that column. "
                "Remove the key, or name a type that reads it."
            )
