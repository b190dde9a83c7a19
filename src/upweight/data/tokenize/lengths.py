"""Lengths of records and their limits: what is too long is dropped, truncated or refused, never cut to nothing."""

from dataclasses import replace
from typing import Any

from upweight.config.sections.data import DataSection
from upweight.data.raw_row import IGNORED, Record, RowError
from upweight.methods.base import Method

TOO_LONG = "longer than sequence_len"
TOO_SHORT = "shorter than min_sample_len"
NO_ROOM = "prompt leaves no room for an answer within sequence_len"
NOTHING_LEFT = "nothing to train on within the limits of length"
CUT = "cut to sequence_len"
PROMPT_CUT = "prompt cut to max_prompt_length"

# Columns that are cut at their end, by the kind of records; prompts to complete have none.
CUT_COLUMNS = {
    "pairs": ("chosen_ids", "rejected_ids"),
    "labelled": ("completion_ids",),
    "steps": ("ids", "labels"),
    "text": ("ids", "loss_mask"),
    "distilled": ("ids", "loss_mask"),
    "documents": ("ids", "loss_mask"),
}


def kind_of_records(method: Method) -> str:
    """Return the kind of a method's prepared records; a document is what EBFT reads in strided mode."""
    if method.evaluates_loss and method.data == "text":
        return "distilled"
    return "documents" if method.strided else method.data


def lengths_of(columns: dict[str, Any], method: Method) -> tuple[int, int, int]:
    """Return the token counts of a record's prompt, of its longest completion, and of its longest sequence."""
    names = CUT_COLUMNS.get(kind_of_records(method), ())
    if "ids" in names:
        size, trained = len(columns["ids"]), sum(columns["loss_mask"]) if "loss_mask" in names else 0
        return size - trained if trained else 0, trained, size
    prompt, completion = len(columns["prompt_ids"]), max((len(columns[name]) for name in names), default=0)
    return prompt, completion, prompt + completion


def apply_length_rules(record: Record, data: DataSection, method: Method) -> tuple[Record | None, str | None]:
    """Return the record, truncated if the rules say so, or None if it is dropped; and the reason for any change."""
    kind, limit, reason = kind_of_records(method), data.max_prompt_length, None
    names = CUT_COLUMNS.get(kind, ())
    prompt = record.columns.get("prompt_ids", [])
    if limit is not None and len(prompt) > limit:
        first = prompt[: min(record.pinned, limit - 1)]
        prompt = first + prompt[len(prompt) - (limit - len(first)) :]
        record, reason = replace(record, columns=record.columns | {"prompt_ids": prompt}), PROMPT_CUT
    size = lengths_of(record.columns, method)[-1]
    if size < data.min_sample_len:
        return None, TOO_SHORT
    if size > data.sequence_len and names:
        # A document has no end that training needs: it is truncated whatever the strategy.
        if data.too_long == "drop" and kind != "documents":
            return None, TOO_LONG
        if data.too_long == "raise" and kind != "documents":
            rule = f"at most {data.sequence_len} tokens (excess_length_strategy: raise)"
            raise RowError("sequence_len", f"{rule}, got {size}")
        room = data.sequence_len - len(prompt)
        if room < 1:
            return None, NO_ROOM
        cut = {name: record.columns[name][:room] for name in names}
        record, reason = replace(record, columns=record.columns | cut), CUT
    if "labels" in names and all(label == IGNORED for label in record.columns["labels"]):
        return None, NOTHING_LEFT
    if "loss_mask" in names and not any(record.columns["loss_mask"]):
        return None, NOTHING_LEFT
    return record, reason
