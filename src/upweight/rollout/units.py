"""Scored groups -> what the trainer learns from."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from upweight.types import Completion, Group, Sample, Unit

SAMPLED, FAILED, SHOWN = 0, -1, 1  # labels, where not all samples are the policy's


def units_of_groups(
    groups: Sequence[Group], *, mask_truncated: bool, sampler_logps: bool, labelled: bool = False
) -> list[Unit]:
    """One unit for each completion, in order; group-mates carry the same group number.

    A completion in several stretches is a unit of several samples, which share its place in a mean. One that failed is
    a sample without scored tokens, labelled as not the policy's, so that no denominator counts it.

    `mask_truncated`: nothing of a completion that hit the length limit is scored. `sampler_logps`: completions carry
    what their sampler said, where that is not the policy that trains. `labelled`: demonstrations are
    trained on beside them.
    """
    units: list[Unit] = []
    for number, group in enumerate(groups):
        assert group.advantage_S is not None, "a group reached the trainer without advantages"
        for completion, advantage in zip(group.completions, group.advantage_S.tolist(), strict=True):
            hidden = mask_truncated and not completion.finished
            parts = [
                _sample(group.prompt_ids, part, advantage, hidden=hidden, sampler_logps=sampler_logps)
                for part in (completion, *completion.earlier)
            ]
            units.append(Unit(_shared(parts), number))
    failed = [one.failure is not None for group in groups for one in group.completions]
    if any(failed) or labelled:
        units = [_labelled(unit, FAILED if gone else SAMPLED) for unit, gone in zip(units, failed, strict=True)]
    return units


def units_of_documents(groups: Sequence[Group], starts: Sequence[Sequence[int]]) -> list[Unit]:
    """One unit for each pass over a document: a sample of every block, with the text before it.

    A group's completions lie block by block; `starts` says where the blocks of each group begin.
    """
    units: list[Unit] = []
    for number, (group, own) in enumerate(zip(groups, starts, strict=True)):
        assert group.advantage_S is not None, "a document reached the trainer without advantages"
        count, advantages = len(group.completions) // len(own), group.advantage_S.tolist()
        blocks = [
            _sample(group.prompt_ids[: own[place // count]], one, advantages[place], hidden=False, sampler_logps=False)
            for place, one in enumerate(group.completions)
        ]
        units += [_labelled(Unit(tuple(blocks[member::count]), number), SAMPLED) for member in range(count)]
    return units


def demonstration(number: int, ids: Sequence[int], scored: Sequence[bool]) -> Unit:
    """A true text, of which the scored tokens are to be learned."""
    sample = Sample(np.array(ids, np.int64), np.array(scored, np.bool_), label=SHOWN, advantage=0.0)
    return Unit((sample,), number)


def _shared(parts: Sequence[Sample]) -> tuple[Sample, ...]:
    """The stretches of one completion, each with its share of the completion's scored tokens."""
    tokens = [int(part.scored.sum()) for part in parts]
    whole = sum(tokens)
    shares = [count / whole if whole else 1 / len(parts) for count in tokens]
    return tuple(replace(part, share=share) for part, share in zip(parts, shares, strict=True))


def _labelled(unit: Unit, label: int) -> Unit:
    return replace(unit, samples=tuple(replace(sample, label=label) for sample in unit.samples))


def _sample(
    prompt_ids: Sequence[int], completion: Completion, advantage: float, *, hidden: bool, sampler_logps: bool
) -> Sample:
    length = len(completion.ids)
    sampled = np.ones(length, np.bool_) if completion.sampled is None else np.array(completion.sampled, np.bool_)
    if hidden:
        sampled = np.zeros(length, np.bool_)
    logps = None
    if sampler_logps and len(completion.logps) == length:
        logps = np.array(completion.logps, np.float32)[sampled]
    return Sample(
        ids=np.array([*prompt_ids, *completion.ids], np.int64),
        scored=np.concatenate([np.zeros(len(prompt_ids), np.bool_), sampled]),
        advantage=advantage,
        sampler_logps=logps,
    )
