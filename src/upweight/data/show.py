"""Prepared rows for people: the text they were made of, and their tokens."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from upweight.config import Config
from upweight.data.chunks import within_limits
from upweight.data.prepare import Prepared, jobs_of


def shown_rows(config: Config, prepared: Prepared, count: int, *, tokens: bool) -> Iterator[dict[str, Any]]:
    """The first rows of training: rendered text, and with `tokens` the ids and which of them are trained on."""
    order, origin = np.load(prepared.folder / "order.npy"), np.load(prepared.folder / "origin.npy")
    jobs = jobs_of(config, prepared.entries)
    for number in range(min(count, len(prepared.train))):
        job, row, record = (int(value) for value in origin[order[number]])
        made = jobs[job].encoder(jobs[job].rows.take(row, row + 1)[0])[record]
        kept = within_limits(jobs[job], row, made)[0]
        assert kept is not None
        cut = {
            name: jobs[job].encoder.tokens.tokenizer.decode(kept.columns[f"{name}_ids"])
            for name in kept.text
            if kept.columns.get(f"{name}_ids") != made.columns.get(f"{name}_ids")
        }
        # What JSON does not know, dates for example, is shown as the text that rewards get too.
        text = json.loads(json.dumps({**kept.text, **cut}, default=str))
        yield {**text, **(_tokens(prepared.train[number]) if tokens else {})}


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if name == "ids" or name.endswith("_ids")}
    if "scored" in row:
        shown["loss_mask"] = [int(mark) for mark in row["scored"]]
    if "ids" in row and "labels" in row:
        shown["token_labels"] = row["labels"]
        shown["loss_mask"] = [int(mark != -100) for mark in row["labels"]]
    return shown
