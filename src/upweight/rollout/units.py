"""Converts scored groups into the units that the trainer learns from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from upweight.rollout.rollout import images_before, images_of
from upweight.types import Completion, Group, ImageRef, Sample, Unit

SAMPLED, FAILED, DEMONSTRATION = 0, -1, 1  # labels, where some samples are not the policy's


def units_of_groups(
    groups: Sequence[Group], *, mask_truncated: bool, sampler_logps: bool, labelled: bool = False
) -> list[Unit]:
    """Return one unit for each completion, in order; completions of one prompt have the same group number.

    A completion of several segments is a unit of several samples, which share one weight in a mean over sequences. A
    failed completion is a sample without scored tokens, labelled FAILED, so that no denominator counts it.

    `mask_truncated`: no token of a completion that hit the length limit is scored. `sampler_logps`: samples carry the
    sampler's log-probs, where those may differ from the policy's. `labelled`: samples get labels, because
    demonstrations are trained on beside them.
    """
    units: list[Unit] = []
    for group_index, group in enumerate(groups):
        assert group.advantage_S is not None, "a group reached the trainer without advantages"
        for completion, advantage in zip(group.completions, group.advantage_S.tolist(), strict=True):
            masked = mask_truncated and not completion.finished
            segments = [
                _sample_of(
                    group.prompt_ids, segment, advantage, masked=masked, with_logps=sampler_logps, version=group.version
                )
                for segment in completion.segments
            ]
            shown = [images_of(group, segment) for segment in completion.segments]
            segments = [replace(segment, images=images) for segment, images in zip(segments, shown, strict=True)]
            tokens = [int(segment.loss_mask.sum()) for segment in segments]
            shares = [count / sum(tokens) if sum(tokens) else 1 / len(segments) for count in tokens]
            parts = zip(segments, shares, strict=True)
            samples = tuple(replace(segment, share=share) for segment, share in parts)
            units.append(Unit(samples, group_index, **_of_teacher(group)))
    labels = [_label(completion) for group in groups for completion in group.completions]
    if any(labels) or labelled:
        units = [_with_label(unit, label) for unit, label in zip(units, labels, strict=True)]
    return units


def _of_teacher(group: Group) -> dict[str, Any]:
    """Return the fields of a unit about its teacher."""
    prompt = group.row.get("teacher_prompt_ids")
    seen = None if prompt is None else (len(group.prompt_ids), np.array(prompt, np.int64))
    return {"teacher": group.row.get("teacher_id"), "teacher_prompt": seen}


def _label(completion: Completion) -> int:
    if completion.failure is not None:
        return FAILED
    return DEMONSTRATION if completion.demonstration else SAMPLED


def units_of_documents(groups: Sequence[Group], starts: Sequence[Sequence[int]]) -> list[Unit]:
    """Return one unit for each pass over a document: a sample of every block, with the text before it."""
    # A group's completions are ordered by block; `starts` has the block starts of each group.
    units: list[Unit] = []
    for group_index, (group, block_starts) in enumerate(zip(groups, starts, strict=True)):
        assert group.advantage_S is not None, "a document reached the trainer without advantages"
        count, advantages = len(group.completions) // len(block_starts), group.advantage_S.tolist()
        blocks = []
        for index, completion in enumerate(group.completions):
            at = block_starts[index // count]
            sample = _sample_of(group.prompt_ids[:at], completion, advantages[index])
            blocks.append(replace(sample, images=images_before(group, at)))
        units += [_with_label(Unit(tuple(blocks[member::count]), group_index), SAMPLED) for member in range(count)]
    return units


def demonstration(group: int, ids: Sequence[int], loss_mask: Sequence[bool], images: tuple[ImageRef, ...] = ()) -> Unit:
    """Return a demonstration, a text to imitate, with the images that its tokens hold."""
    mask = np.array(loss_mask, np.bool_)
    sample = Sample(np.array(ids, np.int64), mask, label=DEMONSTRATION, advantage=0.0, images=images)
    return Unit((sample,), group)


def _with_label(unit: Unit, label: int) -> Unit:
    return replace(unit, samples=tuple(replace(sample, label=label) for sample in unit.samples))


def _sample_of(
    prompt: Sequence[int],
    completion: Completion,
    advantage: float,
    *,
    masked: bool = False,
    with_logps: bool = False,
    version: int = 0,
) -> Sample:
    length = len(completion.ids)
    sampled = np.full(length, not masked)
    if completion.sampled is not None:
        sampled &= np.array(completion.sampled, np.bool_)
    logps = None
    if len(completion.logps) == length:
        logps = np.array(completion.logps, np.float32)[sampled]
    versions = completion.versions if len(completion.versions) == length else [version] * length
    return Sample(
        ids=np.array([*prompt, *completion.ids], np.int64),
        loss_mask=np.concatenate([np.zeros(len(prompt), np.bool_), sampled]),
        advantage=advantage,
        sampler_logps=logps if with_logps else None,
        drawn_logps=logps,
        versions=np.array(versions, np.float32)[sampled],
        token_advantages=np.array(completion.advantages, np.float32)[sampled] if completion.advantages else None,
        routes=completion.routes,
    )
