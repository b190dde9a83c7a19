"""Prefix trees: sequences with a common prefix share its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Forest:
    """Distinct tokens of some sequences in depth-first preorder.

    `end_N[k]` is the position after the last descendant of k, so that `q sees k <=> k <= q < end_N[k]`;
    tokens of one unbranched segment have equal ends, and neighbours with equal ends are of one segment.
    """

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
    for place in range(1, len(order)):
        left, right = sequences[order[place - 1]], sequences[order[place]]
        length = min(len(left), len(right))
        differ = np.append(left[:length] != right[:length], True)
        shared[place] = differ.argmax()
    return order, shared
