"""Length limits of records: a record that is too long is dropped, truncated or refused, never cut to nothing."""

from dataclasses import replace
from typing import Any

from upweight.config.sections.data import DataSection
from upweight.data.raw_row import Record, RowError
from upweight.methods.base import Method

TOO_LONG = "longer than sequence_len"
TOO_SHORT = "shorter than min_sample_len"
NO_ROOM = "prompt leaves no room for an answer within sequence_len"
NOTHING_LEFT = "nothing to train on within the limits of length"
CUT = "cut to sequence_len"
PROMPT_CUT = "prompt cut to max_prompt_length"

ANSWERS = {"pairs": ("chosen_ids", "rejected_ids"), "labelled": ("completion_ids",)}

LengthOutcome = tuple[Record | None, str | None]


def apply_length_rules(record: Record, data: DataSection, method: Method) -> LengthOutcome:
    """Return the record, truncated if the rules say so, or None if it is dropped; and the reason for any change."""
    reason = None
    if "prompt_ids" in record.columns:
        record, reason = _cut_prompt(record, data.max_prompt_length)
    if token_count(record) < data.min_sample_len:
        return None, TOO_SHORT
    if "ids" in record.columns:
        kept, outcome_reason = _whole(record, data, method)
    elif method.data in ANSWERS:
        kept, outcome_reason = _answers(record, data, ANSWERS[method.data])
    else:
        kept, outcome_reason = record, None
    return kept, outcome_reason or reason


def token_count(record: Record) -> int:
    """Return the token count of the longest sequence of a record."""
    columns = record.columns
    if "ids" in columns:
        return len(columns["ids"])
    answers = [len(columns[key]) for key in ("chosen_ids", "rejected_ids", "completion_ids") if key in columns]
    return len(columns["prompt_ids"]) + max(answers, default=0)


def _cut_prompt(record: Record, limit: int | None) -> tuple[Record, str | None]:
    ids: list[int] = record.columns["prompt_ids"]
    if limit is None or len(ids) <= limit:
        return record, None
    first = ids[: min(record.pinned, limit - 1)]
    return _with(record, prompt_ids=first + ids[len(ids) - (limit - len(first)) :]), PROMPT_CUT


def _answers(record: Record, data: DataSection, keys: tuple[str, ...]) -> LengthOutcome:
    if token_count(record) <= data.sequence_len:
        return record, None
    if data.too_long == "drop":
        return None, TOO_LONG
    if data.too_long == "raise":
        raise _too_long_error(record, data)
    room = data.sequence_len - len(record.columns["prompt_ids"])
    if room < 1:
        return None, NO_ROOM
    return _with(record, **{key: record.columns[key][:room] for key in keys}), CUT


def _whole(record: Record, data: DataSection, method: Method) -> LengthOutcome:
    parallel = "labels" if "labels" in record.columns else "scored"
    limit, reason = data.sequence_len, None
    is_document = method.data == "prompts"
    if len(record.columns["ids"]) > limit:
        # A document has no end that training needs: it is truncated whatever the strategy.
        if data.too_long == "drop" and not is_document:
            return None, TOO_LONG
        if data.too_long == "raise" and not is_document:
            raise _too_long_error(record, data)
        record, reason = _with(record, **{key: record.columns[key][:limit] for key in ("ids", parallel)}), CUT
    return (record, reason) if _is_trained(record.columns[parallel]) else (None, NOTHING_LEFT)


def _is_trained(marks: list[Any]) -> bool:
    return any(mark is True or (mark is not False and mark != -100) for mark in marks)


def _too_long_error(record: Record, data: DataSection) -> RowError:
    rule = f"at most {data.sequence_len} tokens (excess_length_strategy: raise)"
    return RowError("sequence_len", f"{rule}, got {token_count(record)}")


def _with(record: Record, **columns: Any) -> Record:
    return replace(record, columns={**record.columns, **columns})
