"""Broadcast rank 0's rollout: per-token values as flat arrays, everything else in a small header."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from upweight.rollout.rollout import Rollout
from upweight.train.distributed.ranks import broadcast_from_rank0, patiently
from upweight.types import Completion

DTYPES = (np.int32, np.float64, np.bool_)


def broadcast_rollout(rollout: Rollout | None) -> Rollout:
    """Return rank 0's rollout on every rank; other ranks pass None."""
    header, numbers = (None, []) if rollout is None else to_flat(rollout)
    header, sizes = broadcast_from_rank0((header, [len(flat) for flat in numbers]))
    if rollout is None:
        numbers = [np.empty(size, kind) for size, kind in zip(sizes, DTYPES, strict=True)]
    for flat in numbers:
        if len(flat):
            with patiently() as group:
                dist.broadcast(torch.from_numpy(flat.view(np.uint8)), src=0, group=group)
    return from_flat(header, numbers) if rollout is None else rollout


def to_flat(rollout: Rollout) -> tuple[Any, list[NDArray[Any]]]:
    """Return a header with everything but the per-token values, and one flat array of those per dtype."""
    lists = _token_lists(rollout)
    lengths = [[len(one) for one in of_kind] for of_kind in lists]
    numbers = [
        np.fromiter(chain.from_iterable(of_kind), kind, sum(sizes))
        for of_kind, kind, sizes in zip(lists, DTYPES, lengths, strict=True)
    ]
    # Arrays, since each tensor would be pickled as a separate file.
    scores = [tuple(None if x is None else x.numpy() for x in (g.rewards_SR, g.advantage_S)) for g in rollout.groups]
    groups = []
    for group in rollout.groups:
        completions = [_without_tokens(one) for one in group.completions]
        groups.append(replace(group, prompt_ids=[], completions=completions, rewards_SR=None, advantage_S=None))
    return (replace(rollout, groups=groups), lengths, scores), numbers


def from_flat(header: Any, numbers: Sequence[NDArray[Any]]) -> Rollout:
    """Return the rollout that `to_flat` flattened."""
    rollout, lengths, scores = header
    for lists, sizes, flat in zip(_token_lists(rollout), lengths, numbers, strict=True):
        for empty, size, stop in zip(lists, sizes, accumulate(sizes), strict=True):
            empty.extend(flat[stop - size : stop].tolist())
    for group, (rewards, advantages) in zip(rollout.groups, scores, strict=True):
        group.rewards_SR = None if rewards is None else torch.from_numpy(rewards)
        group.advantage_S = None if advantages is None else torch.from_numpy(advantages)
    return rollout


def _token_lists(rollout: Rollout) -> tuple[list[list[Any]], ...]:
    """Return the per-token lists of integers, floats and booleans, in a fixed order."""
    written = [one for group in rollout.groups for completion in group.completions for one in completion.segments]
    integers = [group.prompt_ids for group in rollout.groups]
    integers += [values for one in written for values in (one.ids, one.versions)]
    floats = [values for one in written for values in (one.logps, one.advantages)]
    return integers, floats, [one.sampled for one in written if one.sampled is not None]


def _without_tokens(one: Completion) -> Completion:
    sampled, earlier = None if one.sampled is None else [], [_without_tokens(before) for before in one.earlier]
    return replace(one, ids=[], logps=[], versions=[], advantages=[], sampled=sampled, earlier=earlier)
