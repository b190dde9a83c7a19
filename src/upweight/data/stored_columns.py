"""The columns that prepared rows are stored in, by what a method reads; further columns of a row are one of JSON."""

import json
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from datasets import Dataset

from upweight.methods.base import Method

OTHERS = "columns as JSON"  # column that holds all further columns of a row

IDS, FLAGS = pa.list_(pa.int32()), pa.list_(pa.bool_())
SCHEMAS: dict[str, dict[str, pa.DataType]] = {
    "text": {"input_ids": IDS, "loss_mask": FLAGS},
    "distilled": {
        "input_ids": IDS, "loss_mask": FLAGS, "teacher_id": pa.string(), "teacher_ids": pa.list_(IDS),
        "teacher_logps": pa.list_(pa.list_(pa.float32())),
    },
    "pairs": {"prompt_ids": IDS, "chosen_ids": IDS, "rejected_ids": IDS, "margin": pa.float64()},
    "labelled": {"prompt_ids": IDS, "completion_ids": IDS, "label": pa.bool_()},
    "steps": {"input_ids": IDS, "labels": IDS},
    "prompts": {"prompt_ids": IDS, OTHERS: pa.large_string()},
    "documents": {"input_ids": IDS, "loss_mask": FLAGS, "prompt_length": pa.int32()},
}  # fmt: skip


# Of references to images, in the order of their placeholder tokens.
IMAGES = pa.list_(
    pa.struct(
        {"digest": pa.string(), "path": pa.string(), "tokens": pa.int32(), "token_id": pa.int32(), "grid": IDS}.items()
    )
)


def schema_of(method: Method, *, images: bool = False) -> dict[str, pa.DataType]:
    """Return the columns of prepared rows; `images`: for a model that reads images."""
    distilled = method.evaluates_loss and method.data == "text"
    schema = SCHEMAS["distilled" if distilled else "documents" if method.strided else method.data]
    return schema | {"images": IMAGES} if images else schema


def column_of_records(name: str, records: Sequence[dict[str, Any]], schema: Collection[str]) -> list[Any]:
    """Return the values of a column; one holds all that have no column in the schema, as JSON."""
    if name != OTHERS:
        return [record.get(name) for record in records]
    return [json.dumps({k: v for k, v in record.items() if k not in schema}, default=str) for record in records]


def with_columns(stored: Dataset, names: Collection[str]) -> Dataset:
    """Return stored rows with only the columns in `names`; those stored as JSON become columns again."""
    kept = [name for name in stored.column_names if name in names or name == OTHERS]
    rows = stored.select_columns(kept)
    return rows.with_transform(partial(_columns_from_json, sorted(set(names) - set(kept)))) if OTHERS in kept else rows


def _columns_from_json(names: Sequence[str], columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Turn the columns that were stored as JSON back into columns; a missing value is None."""
    if OTHERS not in columns:
        return columns
    others = [json.loads(text) for text in columns[OTHERS]]
    kept = {name: values for name, values in columns.items() if name != OTHERS}
    return kept | {name: [row.get(name) for row in others] for name in names}
