"""Checks that KTO data has both desirable and undesirable completions."""

from collections.abc import Callable

import pyarrow.compute as pc
from datasets import Dataset

from upweight.errors import UserError
from upweight.methods.base import Method


def require_both_labels(rows: Dataset, method: Method, first: Callable[[], str]) -> None:
    """Raise a UserError if all rows have the same label, unless the other label has weight 0; `first` names a row."""
    weights = method.label_weights
    if weights is None or not len(rows):
        return
    labels = pc.call_function("unique", [rows.with_format("arrow")["label"]]).to_pylist()
    missing = {True, False} - set(labels)
    if missing and all(weights[label] > 0 for label in missing):
        label = str(labels[0]).lower()
        key = "kto_undesirable_weight" if labels[0] else "kto_desirable_weight"
        raise UserError(
            f"{first()}, 'label': it and all other rows ({len(rows)}) are labelled {label}; KTO compares "
            f"desirable with undesirable completions. Add rows with the other label, or set '{key}: 0' to train on one."
        )
