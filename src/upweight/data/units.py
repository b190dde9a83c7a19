"""Prepared rows of one optimizer step -> the units the engine packs."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upweight.methods.base import Method
from upweight.types import Sample, Unit

IGNORED = -100  # a position of `steps` data without a class
MISMATCHED = -1


def units_of(rows: Sequence[Mapping[str, Any]], method: Method, *, compare: bool = False) -> list[Unit]:
    """The units of one optimizer step over all ranks, in the order of its rows; KTO's mismatched ones come last.

    `compare`: of labelled rows, a desirable and an undesirable answer to one prompt become a pair.
    """
    if method.data == "pairs":
        return [_pair(row, number, method) for number, row in enumerate(rows)]
    if method.data == "labelled":
        matched = [Unit((_labelled(row, row, int(row["label"])),), number) for number, row in enumerate(rows)]
        matched = _compared(matched, rows) if compare else matched
        return matched + (_mismatched(rows, method.mismatched) if method.mismatched else [])
    if method.data == "steps":
        return [Unit((_steps(row),), number) for number, row in enumerate(rows)]
    return [Unit((_text(row),), number) for number, row in enumerate(rows)]


def _text(row: Mapping[str, Any]) -> Sample:
    return Sample(_ids(row["ids"]), np.asarray(row["scored"], np.bool_))


def _steps(row: Mapping[str, Any]) -> Sample:
    labels = _ids(row["labels"])
    scored = labels != IGNORED
    return Sample(_ids(row["ids"]), scored, labels=labels[scored])


def _pair(row: Mapping[str, Any], number: int, method: Method) -> Unit:
    sides = []
    for side in ("chosen", "rejected"):
        prompt, answer = _ids(row["prompt_ids"]), _ids(row[f"{side}_ids"])
        if method.head == "sequence_score":  # a reward head scores the last position
            ids = np.concatenate([prompt, answer])
            sides.append(Sample(ids, np.arange(len(ids)) == len(ids) - 1, labels=np.zeros(1, np.int64)))
        else:
            with_prompt = method.scores_prompt and side == "chosen"
            sides.append(_completion(prompt, answer, with_prompt, row.get(f"ref_{side}_logps")))
    return Unit(tuple(sides), number, margin=row.get("margin"))


def _completion(
    prompt: NDArray[np.int64], answer: NDArray[np.int64], with_prompt: bool = False, ref_logps: Any = None
) -> Sample:
    """A prompt and an answer; the answer's tokens are scored, on request the prompt's too."""
    in_prompt = np.arange(len(prompt) + len(answer)) < len(prompt)
    scored = np.ones_like(in_prompt) if with_prompt else ~in_prompt
    return Sample(
        np.concatenate([prompt, answer]),
        scored,
        prompt=in_prompt[scored],
        ref_logps=None if ref_logps is None else np.asarray(ref_logps, np.float32),
    )


def _labelled(prompt: Mapping[str, Any], answer: Mapping[str, Any], label: int) -> Sample:
    whole = _completion(_ids(prompt["prompt_ids"]), _ids(answer["completion_ids"]))
    ref_logps = answer.get("ref_completion_logps") if label != MISMATCHED else None
    return Sample(
        whole.ids, whole.scored, label=label, ref_logps=None if ref_logps is None else np.asarray(ref_logps, np.float32)
    )


def _compared(units: Sequence[Unit], rows: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """The units, those of a prompt's desirable and undesirable answers joined one to one."""
    result: list[Unit | None] = []
    waiting: dict[tuple[bytes, bool], list[int]] = {}
    for place, (unit, row) in enumerate(zip(units, rows, strict=True)):
        prompt, good = _ids(row["prompt_ids"]).tobytes(), bool(row["label"])
        if others := waiting.get((prompt, not good)):
            other = units[first := others.pop(0)]
            pair = (unit, other) if good else (other, unit)
            result[first] = Unit(pair[0].samples + pair[1].samples, other.group)
            result.append(None)
        else:
            waiting.setdefault((prompt, good), []).append(place)
            result.append(unit)
    return [unit for unit in result if unit is not None]


def _mismatched(rows: Sequence[Mapping[str, Any]], which: Literal["rotate", "all"]) -> list[Unit]:
    """Prompts with answers that were given to others: the previous row's, or every other row's."""
    if which == "all":
        couples = list(permutations(range(len(rows)), 2))
    else:
        couples = [(number, number - 1) for number in range(len(rows))] if len(rows) > 1 else []
    return [Unit((_labelled(rows[prompt], rows[answer], MISMATCHED),), prompt) for prompt, answer in couples]


def _ids(values: Any) -> NDArray[np.int64]:
    return np.asarray(values, np.int64)
