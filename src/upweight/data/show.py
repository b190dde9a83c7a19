"""Prepared rows as `preprocess --show` prints them: their text and their tokens."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from upweight.config import Config
from upweight.data.chunks import within_limits
from upweight.data.prepare import Prepared, jobs_of


def shown_rows(config: Config, prepared: Prepared, count: int, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """Yield the first training rows: rendered text, and with `tokens` the ids and the loss mask."""
    order, origin = np.load(prepared.folder / "order.npy"), np.load(prepared.folder / "origin.npy")
    jobs = jobs_of(config, prepared.entries)
    for number in range(min(count, len(prepared.train))):
        job, row, record = (int(value) for value in origin[order[number]])
        encoded = jobs[job].encoder(jobs[job].rows.take(row, row + 1)[0])[record]
        kept = within_limits(jobs[job], row, encoded)[0]
        assert kept is not None
        cut = {
            name: jobs[job].encoder.tokens.tokenizer.decode(kept.columns[f"{name}_ids"])
            for name in kept.text
            if kept.columns.get(f"{name}_ids") != encoded.columns.get(f"{name}_ids")
        }
        # Values that JSON does not support, such as dates, are shown as the text that rewards get too.
        text = json.loads(json.dumps({**kept.text, **cut}, default=str))
        yield {**text, **(_tokens(prepared.train[number]) if tokens else {})}


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name == "ids" or name.endswith("_ids")}
    if "scored" in row:
        columns["loss_mask"] = [int(mark) for mark in row["scored"]]
    if "ids" in row and "labels" in row:
        columns["token_labels"] = row["labels"]
        columns["loss_mask"] = [int(mark != -100) for mark in row["labels"]]
    return columns
