"""Whether labelled rows hold what KTO compares: answers that are wanted, and others that are not."""

from collections.abc import Callable

import pyarrow.compute as pc
from datasets import Dataset

from upweight.errors import UserError
from upweight.methods.base import Method


def require_both_labels(rows: Dataset, method: Method, first: Callable[[], str]) -> None:
    """Refuse rows that are all labelled alike, unless the other kind counts for nothing; `first` names a row."""
    weights = method.verdict_weights
    if weights is None or not len(rows):
        return
    found = pc.call_function("unique", [rows.with_format("arrow")["label"]]).to_pylist()
    missing = {True, False} - set(found)
    if missing and all(weights[verdict] > 0 for verdict in missing):
        label = str(found[0]).lower()
        key = "kto_undesirable_weight" if found[0] else "kto_desirable_weight"
        raise UserError(
            f"{first()}, 'label': it and all other rows ({len(rows)}) are labelled {label}; KTO compares wanted with "
            f"unwanted answers. Add rows of the other kind, or set '{key}: 0' to train on these alone."
        )
