"""Units of training data -> prefix trees, which share common prefixes -> rows under a token budget -> batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upweight.engine.images import batch_images, fold_keys
from upweight.types import Batch, Sample, Unit

Layout = Literal["tree", "padded"]


def bucketed(length: int) -> int:
    """Round up to one of few lengths (multiples of 128, steps of at most an eighth), so few shapes are compiled."""
    step = max(128, 1 << max(0, length - 1).bit_length() >> 4)
    return max(1, math.ceil(length / step)) * step


def whole_blocks(length: int) -> int:
    """Round up to a multiple of 128, the block of the attention kernel, which is compiled for any number of blocks."""
    return max(1, math.ceil(length / 128)) * 128


def build_batch(
    units: Sequence[Unit],
    layout: Layout = "tree",
    predict: bool = True,
    pad_to: Callable[[int], int] | None = None,
    weighs: Callable[[Sample], bool] | None = None,
) -> Batch:
    """Build the batch of one forward: trees in one row, or a right-padded row for each sample.

    `predict`: a scored token is the target of the token before it (a first token has none and is not scored);
    otherwise, for score heads, each scored position is a source itself and its class the target.
    Without units: a one-token row with one scored token, for a rank that has no more rows. Its forward fires every
    hook; multiply its outputs by zero instead of calling the method's loss.
    `weighs`: whose tokens count where routers are balanced.
    """
    if not units:
        weighs = weighs and (lambda sample: False)
        units, predict = [Unit((Sample(ids=np.zeros(1, np.int64), loss_mask=np.ones(1, np.bool_)),))], False
    samples = [sample for unit in units for sample in unit.samples]
    tokens = _tree_tokens(samples, pad_to) if layout == "tree" else _padded_tokens(samples, pad_to)
    batch = _assemble_batch(units, samples, predict, tokens)
    if (images := batch_images(samples, tokens.paths, tuple(tokens.ids_BN.shape))) is not None:
        batch = replace(batch, images=images)
    if (routes_NLA := _routes(samples, tokens)) is not None:
        batch = replace(batch, routes_NLA=routes_NLA)
    if weighs is None:
        return batch
    counted = [path for path, sample in zip(tokens.paths, samples, strict=True) if weighs(sample)]
    number = np.bincount(np.concatenate([np.zeros(0, np.int64), *counted]), minlength=tokens.ids_BN.numel())
    return replace(batch, weight_BN=torch.from_numpy(number).float().view(tokens.ids_BN.shape))


def count_batch(units: Sequence[Unit], predict: bool = True) -> Batch:
    """Build a batch without tokens, which methods count units in before any forward."""
    samples = [sample for unit in units for sample in unit.samples]
    empty = torch.zeros((1, 0), dtype=torch.int64)
    paths = [np.zeros(len(sample.ids), np.int64) for sample in samples]
    return _assemble_batch(units, samples, predict, _Tokens(empty, empty, empty, None, paths))


class _Tokens(NamedTuple):
    """The first fields of a batch, tokens in the model's layout; and the flat positions of each sample's tokens."""

    ids_BN: Tensor
    position_BN: Tensor
    end_BN: Tensor | None
    length_B: Tensor | None
    paths: list[NDArray[np.int64]]


def _assemble_batch(units: Sequence[Unit], samples: Sequence[Sample], predict: bool, tokens: _Tokens) -> Batch:
    """Build a batch from tokens in their layout, their scored positions and the fields of units and samples."""
    scored = [np.flatnonzero(sample.loss_mask) for sample in samples]
    kept = [slice(int(predict and at[:1].tolist() == [0]), None) for at in scored]
    scored = [at[keep] for at, keep in zip(scored, kept, strict=True)]
    sources = [path[at - int(predict)] for path, at in zip(tokens.paths, scored, strict=True)]
    if predict:
        targets = [sample.ids[at] for sample, at in zip(samples, scored, strict=True)]
    else:
        targets = [np.zeros_like(at) if s.labels is None else s.labels for s, at in zip(samples, scored, strict=True)]
    return Batch(
        *tokens[:4],
        source_T=torch.from_numpy(np.concatenate(sources)),
        target_T=torch.from_numpy(np.concatenate(targets)),
        sequence_T=torch.from_numpy(np.repeat(np.arange(len(samples)), [len(at) for at in scored])),
        num_sequences=len(samples),
        pair_P2=_pair_sequences(units),
        margin_P=_optional_tensor([unit.margin for unit in units], torch.float32),
        label_S=_optional_tensor([sample.label for sample in samples], torch.int64),
        advantage_S=_optional_tensor([sample.advantage for sample in samples], torch.float32),
        advantage_T=_token_advantages(samples, kept),
        share_S=torch.tensor([s.share for s in samples]) if any(s.share != 1 for s in samples) else None,
        prompt_T=_concat_kept([s.prompt for s in samples], kept, torch.bool),
        old_logps_T=_concat_kept([s.old_logps for s in samples], kept, torch.float32),
        sampler_logps_T=_concat_kept([s.sampler_logps for s in samples], kept, torch.float32),
        drawn_logps_T=_concat_kept([s.drawn_logps for s in samples], kept, torch.float32),
        ref_logps_T=_concat_kept([s.ref_logps for s in samples], kept, torch.float32),
        version_T=_concat_kept([None if s.lag is None else s.versions for s in samples], kept, torch.float32),
        lag_T=_concat_kept([s.lag for s in samples], kept, torch.float32),
        taught_T=_concat_kept([s.taught for s in samples], kept, torch.bool),
        longest=max(map(len, scored), default=0),
        teacher_ids_TK=_concat_kept(_as_wide([s.teacher_ids for s in samples], -1), kept, torch.int64),
        teacher_logps_TK=_concat_kept(_as_wide([s.teacher_logps for s in samples], -np.inf), kept, torch.float32),
    )


def plan_rows(units: Sequence[Unit], budget: int, ranks: int = 1, layout: Layout = "tree") -> list[list[list[int]]]:
    """Return the rows of each rank, each a list of unit numbers for one `build_batch`."""
    # A row holds at most `budget` tokens (trees: distinct ones; padded: samples x longest), unless a single unit is
    # larger. Groups stay whole unless they exceed the budget or a rank's fair share. Every rank gets the same number of
    # rows, some of them empty.
    if not units:
        return [[] for _ in range(ranks)]
    atoms, costs = _tree_atoms(units, budget, ranks) if layout == "tree" else _padded_atoms(units)
    count = math.ceil(len(costs.cut(budget)) / ranks) * ranks
    low, high = 1, budget  # the smallest cap that needs no more rows balances them
    while low < high:
        cap = (low + high) // 2
        low, high = (low, cap) if len(costs.cut(cap)) <= count else (cap + 1, high)
    bounds = costs.cut(high)
    rows = [(costs.of(i, j), sorted(u for atom in atoms[i:j] for u in atom)) for i, j in bounds]
    rows += [(0, [])] * (count - len(rows))
    return _distribute_rows(rows, ranks)


def row_tokens(units: Sequence[Unit], layout: Layout = "tree") -> int:
    """Return the tokens of the row that `build_batch` builds of these units: distinct ones, or samples x longest."""
    sequences = fold_keys([sample for unit in units for sample in unit.samples])
    if layout == "padded":
        return len(sequences) * max(map(len, sequences))
    return sum(map(len, sequences)) - int(sorted_with_shared(sequences)[1].sum())


@dataclass(frozen=True, eq=False)
class Forest:
    """Distinct tokens of some sequences in depth-first preorder."""

    # `end_N[k]` is the position after the last descendant of k, so that `q sees k <=> k <= q < end_N[k]`; tokens of one
    # unbranched segment have equal ends, and neighbours with equal ends are of one segment.

    ids_N: NDArray[np.int64]
    position_N: NDArray[np.int64]  # depth: continues from the branch point
    end_N: NDArray[np.int64]
    paths: list[NDArray[np.int64]]  # positions of each sequence's tokens, in the caller's order of sequences


def fold(sequences: Sequence[NDArray[np.int64]]) -> Forest:
    """Return the forest that holds each distinct prefix of the sequences once."""
    order, shared = sorted_with_shared(sequences)
    total = sum(len(ids) for ids in sequences) - int(shared.sum())
    ids_N, position_N, end_N = (np.empty(total, np.int64) for _ in range(3))
    path = np.empty(max((len(ids) for ids in sequences), default=0), np.int64)
    paths: list[NDArray[np.int64]] = [path] * len(sequences)
    start = open_depth = 0
    for number, common in zip(order, shared.tolist(), strict=True):
        ids = sequences[number]
        depth = len(ids)
        end_N[path[common:open_depth]] = start  # tokens of the last sequence that this one does not share are complete
        stop = start + depth - common
        ids_N[start:stop] = ids[common:]
        position_N[start:stop] = np.arange(common, depth)
        path[common:depth] = np.arange(start, stop)
        paths[number] = path[:depth].copy()
        start, open_depth = stop, depth
    end_N[path[:open_depth]] = start
    return Forest(ids_N, position_N, end_N, paths)


def sorted_with_shared(sequences: Sequence[NDArray[np.int64]]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the sequences' lexicographic order, and how many first tokens each shares with the one before it."""
    # Big-endian bytes compare as the numbers do, and a prefix comes before its continuations.
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for index in range(1, len(order)):
        left, right = sequences[order[index - 1]], sequences[order[index]]
        length = min(len(left), len(right))
        differ = np.append(left[:length] != right[:length], True)
        shared[index] = differ.argmax()
    return order, shared


def _tree_tokens(samples: Sequence[Sample], pad_to: Callable[[int], int] | None) -> _Tokens:
    """Fold samples into trees in one row."""
    forest = fold(fold_keys(samples))
    length = len(forest.ids_N)
    width = max(1, length if pad_to is None else pad_to(length))
    ids, position = np.zeros((2, width), np.int64)
    end = np.arange(1, width + 1)  # a padding token sees only itself
    ids[:length], position[:length], end[:length] = forest.ids_N, forest.position_N, forest.end_N
    for sample, path in zip(samples, forest.paths, strict=True):
        if sample.images:  # which folded by the numbers of its images
            ids[path] = sample.ids
    ids_BN, position_BN, end_BN = (torch.from_numpy(row)[None] for row in (ids, position, end))
    return _Tokens(ids_BN, position_BN, end_BN, None, forest.paths)


def _padded_tokens(samples: Sequence[Sample], pad_to: Callable[[int], int] | None) -> _Tokens:
    """Lay each sample out in a row, padded on the right."""
    longest = max(len(sample.ids) for sample in samples)
    width = max(1, longest if pad_to is None else pad_to(longest))
    ids = np.zeros((len(samples), width), np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.ids)] = sample.ids
    position_BN = torch.arange(width).expand(len(samples), -1).contiguous()
    # A row without any visible token would give NaN.
    length_B = torch.tensor([max(1, len(sample.ids)) for sample in samples])
    paths = [row * width + np.arange(len(sample.ids)) for row, sample in enumerate(samples)]
    return _Tokens(torch.from_numpy(ids), position_BN, None, length_B, paths)


def _routes(samples: Sequence[Sample], tokens: _Tokens) -> Tensor | None:
    """Return the experts that the sampler chose for each token; of a shared token, those of the first that has any."""
    shapes = [sample.routes.shape[1:] for sample in samples if sample.routes is not None]
    if not shapes:
        return None
    routes_NLA = np.full((tokens.ids_BN.numel(), *shapes[0]), -1, np.int16)
    for sample, path in zip(reversed(samples), reversed(tokens.paths), strict=True):
        if sample.routes is not None:
            known = sample.routes[:, 0, 0] >= 0
            routes_NLA[path[known]] = sample.routes[known]
    return torch.from_numpy(routes_NLA)


def _concat_kept(arrays: Sequence[NDArray | None], kept: Sequence[slice], dtype: torch.dtype) -> Tensor | None:
    """Return the kept parts of all samples' arrays concatenated, or None when an array is missing."""
    parts = [array[keep] for array, keep in zip(arrays, kept, strict=True) if array is not None]
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if len(parts) == len(arrays) else None


def _as_wide(lists: Sequence[NDArray | None], fill: float) -> list[NDArray | None]:
    """Return all samples' lists with as many columns as the widest has."""
    width = max([0, *(one.shape[1] for one in lists if one is not None)])
    wider = [((0, 0), (0, 0 if one is None else width - one.shape[1])) for one in lists]
    return [
        None if one is None else np.pad(one, more, constant_values=fill) for one, more in zip(lists, wider, strict=True)
    ]


def _token_advantages(samples: Sequence[Sample], kept: Sequence[slice]) -> Tensor | None:
    """Return an advantage for each scored token where any sample has them by token, else None."""
    if all(sample.token_advantages is None for sample in samples):
        return None
    each = [
        np.full(int(s.loss_mask.sum()), s.advantage or 0.0) if s.token_advantages is None else s.token_advantages
        for s in samples
    ]
    return _concat_kept(each, kept, torch.float32)


def _pair_sequences(units: Sequence[Unit]) -> Tensor | None:
    """Return the sequence numbers of (chosen, rejected) of the units that are pairs, or None without pairs."""
    ends = np.cumsum([len(unit.samples) for unit in units])
    firsts = [int(end) - 2 for unit, end in zip(units, ends, strict=True) if len(unit.samples) == 2]
    if units and not firsts:
        return None
    return torch.tensor([[first, first + 1] for first in firsts], dtype=torch.int64).view(-1, 2)


def _optional_tensor(values: Sequence[float | int | None], dtype: torch.dtype) -> Tensor | None:
    """Return the values as a tensor, or None when a value is missing."""
    return None if any(value is None for value in values) else torch.tensor(values, dtype=dtype)


class _Costs:
    """Tokens of a row that holds neighbouring atoms i to j: head[i] + width[i] * (running[j] - running[i])."""

    def __init__(self, head: NDArray[np.int64], width: NDArray[np.int64], each: NDArray[np.int64]) -> None:
        self.head, self.width = head.tolist(), width.tolist()
        self.running = np.concatenate([[0], np.cumsum(each)])

    def of(self, i: int, j: int) -> int:
        return self.head[i] + self.width[i] * int(self.running[j] - self.running[i])

    def cut(self, cap: int) -> list[tuple[int, int]]:
        """Join neighbouring atoms into as few rows of at most `cap` tokens as possible; return (i, j) ranges."""
        bounds, i, count = [], 0, len(self.head)
        while i < count:
            room = (cap - self.head[i]) // self.width[i]
            j = max(int(np.searchsorted(self.running, self.running[i] + room, side="right")) - 1, i + 1)
            bounds.append((i, j))
            i = j
        return bounds


def _tree_atoms(units: Sequence[Unit], budget: int, ranks: int) -> tuple[list[list[int]], _Costs]:
    """Return the atoms of rows (groups, or the units of groups that are too large), neighbours sharing most tokens."""
    sequences = fold_keys([sample for unit in units for sample in unit.samples])
    order, shared = sorted_with_shared(sequences)
    index = np.empty(len(order), np.int64)
    index[order] = np.arange(len(order))
    unit = np.repeat(np.arange(len(units)), [len(unit.samples) for unit in units])
    group = np.unique([unit.group for unit in units], return_inverse=True)[1][unit]
    tour = np.lexsort((index, _first_of_cluster(index, unit), _first_of_cluster(index, group)))
    index, unit, group = index[tour], unit[tour], group[tour]

    # A sample adds to a tree at most what it does not share with the sample before it.
    before = _shared_between(shared, index)
    each = np.array([len(ids) for ids in sequences], np.int64)[tour] - before
    new_group = np.diff(group, prepend=-1) != 0
    new_unit = np.diff(unit, prepend=-1) != 0
    group_tokens = np.bincount(group, weights=each + before * new_group)
    splits = group_tokens > min(budget, math.ceil(each.sum() / ranks))
    new_atom = new_group | (new_unit & splits[group])

    starts = np.flatnonzero(new_atom)
    parts = (np.split(x, starts[1:]) for x in (unit, new_unit))
    atoms = [part[flags].tolist() for part, flags in zip(*parts, strict=True)]
    return atoms, _Costs(before[starts], np.ones_like(starts), np.add.reduceat(each, starts))


def _padded_atoms(units: Sequence[Unit]) -> tuple[list[list[int]], _Costs]:
    """Return units from the longest to the shortest: a row is as wide as its first unit."""
    longest = np.array([max([1, *(len(sample.ids) for sample in unit.samples)]) for unit in units], np.int64)
    order = np.argsort(-longest, kind="stable")
    samples = np.array([len(unit.samples) for unit in units], np.int64)
    return [[u] for u in order.tolist()], _Costs(np.zeros_like(order), longest[order], samples[order])


def _first_of_cluster(index: NDArray[np.int64], cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each sample the smallest index in its cluster (its unit or group)."""
    first = np.full(cluster.max() + 1, len(index))
    np.minimum.at(first, cluster, index)
    return first[cluster]


def _shared_between(shared: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many first tokens the sample at each index shares with the sample listed before it."""
    # `shared` holds this number for neighbours in the order; for any two indices it is the minimum between them.
    low, high = np.minimum(index[:-1], index[1:]), np.maximum(index[:-1], index[1:])
    if not len(low):
        return np.zeros(len(index), np.int64)
    edges = np.stack([low + 1, high + 1], axis=1).ravel()
    between = np.minimum.reduceat(np.append(shared, 0), edges)[::2]
    return np.concatenate([[0], between])


def _distribute_rows(rows: list[tuple[int, list[int]]], ranks: int) -> list[list[list[int]]]:
    """Distribute rows with their costs: ranks run rows of similar size at the same time, and get similar sums."""
    rows = sorted(rows, key=lambda row: -row[0])
    by_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in range(0, len(rows), ranks):
        lightest_first = sorted(range(ranks), key=load.__getitem__)
        for rank, (cost, units) in zip(lightest_first, rows[i : i + ranks], strict=True):
            by_rank[rank].append(units)
            load[rank] += cost
    return by_rank
