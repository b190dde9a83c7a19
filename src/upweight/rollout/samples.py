"""Scored groups -> what the trainer learns from."""

from collections.abc import Sequence

import numpy as np

from upweight.types import Completion, Group, Sample, Unit


def units_of_groups(groups: Sequence[Group], *, mask_truncated: bool, sampler_logps: bool) -> list[Unit]:
    """One unit for each completion, in order; group-mates carry the same group number.

    `mask_truncated`: nothing of a completion that hit the length limit is scored. `sampler_logps`: completions carry
    what their sampler said, where that is not the policy that trains.
    """
    units: list[Unit] = []
    for number, group in enumerate(groups):
        assert group.advantage_S is not None, "a group reached the trainer without advantages"
        for completion, advantage in zip(group.completions, group.advantage_S.tolist(), strict=True):
            hidden = mask_truncated and not completion.finished
            sample = _sample(group.prompt_ids, completion, advantage, hidden=hidden, sampler_logps=sampler_logps)
            units.append(Unit((sample,), number))
    return units


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
