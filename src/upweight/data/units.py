"""Builds the units that the engine packs from the prepared rows of one optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upweight.data.images.records import image_refs
from upweight.engine.images import image_positions
from upweight.methods.base import Method
from upweight.types import IGNORED, Sample, Unit

MISMATCHED = -1


def units_of(rows: Sequence[Mapping[str, Any]], method: Method, *, compare: bool = False) -> list[Unit]:
    """Return the units of a step in row order, KTO's mismatched pairs last; `compare` joins both labels of a prompt."""
    if method.data == "pairs":
        return [_pair_unit(row, number, method) for number, row in enumerate(rows)]
    if method.data == "labelled":
        matched = [Unit((_labelled(row, row, int(row["label"])),), number) for number, row in enumerate(rows)]
        matched = _paired_by_prompt(matched, rows) if compare else matched
        return matched + (_mismatched_units(rows, method.mismatched) if method.mismatched else [])
    return [Unit((_text_sample(row),), number, teacher=row.get("teacher_id")) for number, row in enumerate(rows)]


def _text_sample(row: Mapping[str, Any]) -> Sample:
    """Build the sample of a text with its mask, or of steps with their labels."""
    if "loss_mask" in row:
        loss_mask = np.asarray(row["loss_mask"], np.bool_)
        return Sample(_as_ids(row["input_ids"]), loss_mask, images=image_refs(row), **_teacher_lists(row, loss_mask))
    labels = _as_ids(row["labels"])
    scored = labels != IGNORED
    return Sample(_as_ids(row["input_ids"]), scored, labels=labels[scored], images=image_refs(row))


def _teacher_lists(row: Mapping[str, Any], loss_mask: NDArray[np.bool_]) -> dict[str, Any]:
    """Return what a teacher logged for the scored tokens, rows filled to the longest; nothing where it logged none."""
    if not row.get("teacher_ids"):
        return {}
    scored = np.flatnonzero(loss_mask)
    ids, logps = ([row[name][at] for at in scored] for name in ("teacher_ids", "teacher_logps"))
    return filled_lists(ids, logps)


def filled_lists(ids: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a teacher's lists as the fields of a sample, rows filled to the longest."""
    width = max([1, *map(len, ids)])
    filled = [
        np.array([[*one, *[fill] * (width - len(one))] for one in rows]) for rows, fill in ((ids, -1), (logps, -np.inf))
    ]
    return {"teacher_ids": filled[0].astype(np.int64), "teacher_logps": filled[1].astype(np.float32)}


def _pair_unit(row: Mapping[str, Any], number: int, method: Method) -> Unit:
    sides = []
    for side in ("chosen", "rejected"):
        prompt, completion = _as_ids(row["prompt_ids"]), _as_ids(row[f"{side}_ids"])
        if method.head == "sequence_score":  # a reward head scores the last position
            ids = np.concatenate([prompt, completion])
            last, label = np.arange(len(ids)) == len(ids) - 1, np.zeros(1, np.int64)
            sides.append(Sample(ids, last, labels=label, images=image_refs(row)))
        else:
            with_prompt = method.scores_prompt and side == "chosen"
            sample = _completion(prompt, completion, with_prompt, row.get(f"ref_{side}_logps"))
            sides.append(_with_images(sample, row))
    return Unit(tuple(sides), number, margin=row.get("margin"))


def _completion(
    prompt: NDArray[np.int64], completion: NDArray[np.int64], with_prompt: bool = False, ref_logps: Any = None
) -> Sample:
    """Build a sample that scores the completion's tokens, and with `with_prompt` the prompt's too."""
    in_prompt = np.arange(len(prompt) + len(completion)) < len(prompt)
    loss_mask = np.ones_like(in_prompt) if with_prompt else ~in_prompt
    ref_logps = None if ref_logps is None else np.asarray(ref_logps, np.float32)
    return Sample(np.concatenate([prompt, completion]), loss_mask, prompt=in_prompt[loss_mask], ref_logps=ref_logps)


def _with_images(sample: Sample, row: Mapping[str, Any]) -> Sample:
    """Return a sample with the images of a row's prompt, of which no token is scored."""
    refs = image_refs(row)
    if not refs:
        return sample
    prompt = sample.prompt
    if prompt is not None and prompt.any():  # ORPO scores prompts
        sample, scored = replace(sample, images=refs), sample.loss_mask.copy()
        for at in image_positions(sample):
            scored[at[0] : at[-1] + 1] = False
        return replace(sample, loss_mask=scored, prompt=prompt[scored[sample.loss_mask]])
    return replace(sample, images=refs)


def _labelled(prompt: Mapping[str, Any], completion: Mapping[str, Any], label: int) -> Sample:
    ref_logps = completion.get("ref_completion_logps") if label != MISMATCHED else None
    sample = _completion(_as_ids(prompt["prompt_ids"]), _as_ids(completion["completion_ids"]), ref_logps=ref_logps)
    return _with_images(replace(sample, label=label, prompt=None), prompt)


def _paired_by_prompt(units: Sequence[Unit], rows: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """Join the units of desirable and undesirable completions of the same prompt one to one."""
    result: list[Unit | None] = []
    waiting: dict[tuple[bytes, bool], list[int]] = {}
    for index, (unit, row) in enumerate(zip(units, rows, strict=True)):
        images = "".join(image.digest for image in unit.samples[0].images).encode()
        prompt, desirable = _as_ids(row["prompt_ids"]).tobytes() + images, bool(row["label"])
        if partners := waiting.get((prompt, not desirable)):
            partner = units[first := partners.pop(0)]
            pair = (unit, partner) if desirable else (partner, unit)
            result[first] = Unit(pair[0].samples + pair[1].samples, partner.group)
            result.append(None)
        else:
            waiting.setdefault((prompt, desirable), []).append(index)
            result.append(unit)
    return [unit for unit in result if unit is not None]


def _mismatched_units(rows: Sequence[Mapping[str, Any]], which: Literal["rotate", "all"]) -> list[Unit]:
    """Build units of prompts with completions of other rows: the previous row's, or every other row's."""
    count = len(rows)
    rotated = [(number, number - 1) for number in range(count) if count > 1]
    pairs = permutations(range(count), 2) if which == "all" else rotated
    return [Unit((_labelled(rows[prompt], rows[completion], MISMATCHED),), prompt) for prompt, completion in pairs]


def _as_ids(values: Any) -> NDArray[np.int64]:
    return np.asarray(values, np.int64)
