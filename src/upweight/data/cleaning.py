"""Rows that resemble others: near duplicates by minhash, training rows that contain evaluation rows, shared prompts."""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

HASHES = 128  # of a signature: two rows share each with a probability of their similarity
SHINGLE = 3  # consecutive words
MOST_ROUNDS = 8  # of comparing a bucket's rows with one of them
COMPARED_AT_ONCE = 1 << 16  # pairs of signatures
CONTAINED = 0.8  # share of an evaluation row's shingles in a training row that counts as containing it
SAMPLED, FEWEST_SAMPLED = 256, 64  # rows that show what is common
SHARED_PROMPT = "with a prompt that is trained on too"
COMMON = 0.2  # share of the rows that makes a shingle common
SYSTEM = {"system", "system_prompt", "tools"}  # what many rows share without being alike
ROLE = ("role", "from")
CJK = "\u3040-\u30ff\u3400-\u9fff"  # written without spaces: each character counts as a word
WORD = re.compile(rf"[^\W{CJK}]+|[{CJK}]|[^\w\s]")
_random = np.random.default_rng(1)
FACTOR_H = _random.integers(1, 1 << 63, HASHES, np.uint64) * 2 + 1
TERM_H = _random.integers(0, 1 << 63, HASHES, np.uint64)
POWERS = [np.uint64(pow(0x9E3779B97F4A7C15, number, 1 << 64)) for number in range(SHINGLE)]


@dataclass(frozen=True)
class RowShingles:
    """Turns rows of a dataset into hashes of runs of words, without system texts and what many rows have."""

    columns: Collection[str] | None  # that are compared; None: all
    common: NDArray[np.uint64]

    @staticmethod
    def of(sample: Sequence[Mapping[str, Any]], columns: Collection[str] | None) -> "RowShingles":
        """Return the shingles of rows like those of a sample, without those that a fifth of the sample has."""
        plain = RowShingles(columns, np.zeros(0, np.uint64))
        if len(sample) < FEWEST_SAMPLED:
            return plain
        shingles, counts = np.unique(np.concatenate([plain(row) for row in sample]), return_counts=True)
        return RowShingles(columns, shingles[counts > COMMON * len(sample)])

    def __call__(self, row: Mapping[str, Any]) -> NDArray[np.uint64]:
        compared = {name: value for name, value in row.items() if self.columns is None or name in self.columns}
        texts = chain.from_iterable(_texts(value) for name, value in compared.items() if name not in SYSTEM)
        words = WORD.findall(" ".join(texts).lower())
        hashed = np.fromiter((zlib.crc32(word.encode("utf-8", "replace")) for word in words), np.uint64, len(words))
        count = max(len(hashed) - SHINGLE + 1, 1)
        padded = np.append(hashed, np.zeros(SHINGLE, np.uint64)) + np.uint64(1)
        runs = np.unique(np.sum([padded[at : at + count] * power for at, power in enumerate(POWERS)], 0, np.uint64))
        distinct = np.setdiff1d(runs, self.common, assume_unique=True) if len(self.common) else runs
        return distinct if len(distinct) else runs


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if "system" not in map(value.get, ROLE):
            yield from chain.from_iterable(_texts(inner) for name, inner in value.items() if name not in ROLE)
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_texts, value))


def signature_of(shingles: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return a row's minhash signature."""
    mixed = (shingles ^ (shingles >> np.uint64(29)))[:, None] * FACTOR_H + TERM_H
    return (mixed >> np.uint64(32)).min(axis=0).astype(np.uint32)


def near_duplicates(signature_NH: NDArray[np.uint32], threshold: float) -> NDArray[np.int64]:
    """Return an earlier row that each row is at least as similar to as `threshold`, or -1."""
    earlier, width = np.full(len(signature_NH), -1), _band_width(threshold)
    for first in range(0, HASHES, width):
        keys = np.zeros(len(signature_NH), np.uint64)
        for number in range(first, first + width):
            keys = (keys + signature_NH[:, number]) * np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(31)
        order = np.argsort(keys, kind="stable")
        for _ in range(MOST_ROUNDS):  # rows of a bucket are compared with its first one, the others with the next
            order = order[earlier[order] < 0]
            starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0)) if len(order) else order
            leaders = np.repeat(order[starts], np.diff(np.append(starts, len(order))))
            others = leaders != order
            if not others.any():
                break
            leaders, order = leaders[others], order[others]
            earlier[order] = np.where(_alike(signature_NH, leaders, order, threshold), leaders, -1)
    return earlier


def _band_width(threshold: float) -> int:
    """Return the widest band by which 99% of the pairs at the threshold share a bucket."""
    widths = [width for width in (32, 16, 8, 4, 2) if (1 - threshold**width) ** (HASHES // width) < 0.01]
    return widths[0] if widths else 1


def _alike(signature_NH: NDArray[np.uint32], first: Any, second: Any, threshold: float) -> NDArray[np.bool_]:
    parts = range(0, len(first), COMPARED_AT_ONCE)
    pairs = [(first[start : start + COMPARED_AT_ONCE], second[start : start + COMPARED_AT_ONCE]) for start in parts]
    return np.concatenate([(signature_NH[a] == signature_NH[b]).mean(axis=1) >= threshold for a, b in pairs])


class Signatures:
    """Signatures on disk, in the order of the rows."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._writer = file.open("wb")

    def add(self, signature_NH: NDArray[np.uint32]) -> None:
        self._writer.write(np.ascontiguousarray(signature_NH).tobytes())

    def repeated(self, threshold: float) -> NDArray[np.bool_]:
        """Return which of the rows repeat an earlier one, and remove the file."""
        self._writer.close()
        there = self.file.stat().st_size
        signature_NH = np.memmap(self.file, np.uint32) if there else np.zeros(0, np.uint32)
        earlier = near_duplicates(signature_NH.reshape(-1, HASHES), threshold)
        self.file.unlink()
        return earlier >= 0


@dataclass(frozen=True)
class EvaluationRows:
    """The shingles of all evaluation rows, sorted, each with the number of its row."""

    shingle_E: NDArray[np.uint64]
    row_E: NDArray[np.int64]
    count_R: NDArray[np.int64]  # shingles of each row

    @staticmethod
    def of(rows: Iterable[NDArray[np.uint64]]) -> "EvaluationRows":
        each = list(rows)
        counts = np.array([len(shingles) for shingles in each], np.int64)
        shingles = np.concatenate([np.zeros(0, np.uint64), *each])
        order = np.argsort(shingles, kind="stable")
        return EvaluationRows(shingles[order], np.repeat(np.arange(len(each)), counts)[order], counts)

    def any_in(self, shingles: NDArray[np.uint64]) -> bool:
        """Return whether a row contains one of these rows."""
        first, last = (np.searchsorted(self.shingle_E, shingles, side) for side in ("left", "right"))
        there = np.flatnonzero(last > first)
        if not len(there):
            return False
        rows = np.concatenate([self.row_E[first[number] : last[number]] for number in there])
        shared = np.bincount(rows, minlength=len(self.count_R))
        return bool((shared >= CONTAINED * self.count_R).any())


class TrainedPrompts:
    """Digests of the prompts that are trained on, by which evaluation rows with one of them are counted."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted, self._seen = wanted, set[bytes]()

    def shared(self, batch: pa.RecordBatch, *, evaluation: bool) -> Counter[str]:
        """Take prepared training rows, or return how many evaluation rows have the prompt of one taken before."""
        prompts = _prompts_of(batch) if self.wanted else []
        digests = [hashlib.blake2b(ids.tobytes(), digest_size=8).digest() for ids in prompts if len(ids) > 1]
        if evaluation:
            return Counter(+Counter({SHARED_PROMPT: sum(digest in self._seen for digest in digests)}))
        self._seen.update(digests)
        return Counter()


def _prompts_of(batch: pa.RecordBatch) -> list[NDArray[Any]]:
    """Return the token ids of each row's prompt: its column, or what comes before the first token trained on."""
    names = set(batch.schema.names)
    if "images" in names:  # one question about many images is not one prompt
        return []
    if "prompt_ids" in names:
        return [np.asarray(ids) for ids in _lists(batch, "prompt_ids")]
    if not {"input_ids", "loss_mask"} <= names:
        return []
    pairs = zip(_lists(batch, "input_ids"), _lists(batch, "loss_mask"), strict=True)
    return [ids[: int(np.argmax(mask))] for ids, mask in pairs]


def _lists(batch: pa.RecordBatch, name: str) -> list[NDArray[Any]]:
    return [np.asarray(value) for value in batch.column(name).to_numpy(zero_copy_only=False) if value is not None]
