"""Images in packed rows: by which numbers sequences fold, where features lie, and positions on a grid."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from upweight.types import Batch, BatchImages, ImageRef, Sample

FIRST_IMAGE = 1 << 31  # numbers above all token ids; keys of sequences are compared as 32 bits
_NONE = -1  # row of features of a token that is no placeholder


def image_positions(sample: Sample) -> list[NDArray[np.int64]]:
    """Return the positions of each image's placeholder tokens in a sequence."""
    at = np.flatnonzero(sample.ids == sample.images[0].token_id)
    counts = [image.tokens for image in sample.images]
    assert len(at) >= sum(counts), "a sequence lacks placeholder tokens of its images"
    return np.split(at, np.cumsum(counts))[:-1]


def fold_keys(samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
    """Return the numbers by which sequences share their beginnings: token ids, and for placeholders their image's."""
    numbers: dict[str, int] = {}
    keys: list[NDArray[np.int64]] = []
    for sample in samples:
        key = sample.ids
        if sample.images:
            key = key.copy()
            for image, at in zip(sample.images, image_positions(sample), strict=True):
                key[at] = FIRST_IMAGE + numbers.setdefault(image.digest, len(numbers))
        keys.append(key)
    return keys


def batch_images(
    samples: Sequence[Sample], paths: Sequence[NDArray[np.int64]], shape: tuple[int, ...]
) -> BatchImages | None:
    """Return the distinct images of some samples, whose tokens lie at the flat positions `paths` of a batch."""
    if not any(sample.images for sample in samples):
        return None
    distinct: dict[str, ImageRef] = {}
    for sample in samples:
        for image in sample.images:
            distinct.setdefault(image.digest, image)
    counts = [image.tokens for image in distinct.values()]
    first = dict(zip(distinct, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    feature_N = np.full(shape[0] * shape[1], _NONE, np.int64)
    position_3N = np.tile(np.arange(shape[1]), (3, shape[0]))
    has_grids = any(image.grid is not None for image in distinct.values())
    for sample, path in zip(samples, paths, strict=True):
        if sample.images:
            for image, at in zip(sample.images, image_positions(sample), strict=True):
                feature_N[path[at]] = first[image.digest] + np.arange(image.tokens)
        position_3N[:, path] = grid_positions(sample)
    at_I = np.flatnonzero(feature_N != _NONE)
    position_3BN = torch.from_numpy(position_3N.reshape(3, *shape)) if has_grids else None
    return BatchImages(
        tuple(distinct.values()), torch.from_numpy(at_I), torch.from_numpy(feature_N[at_I]), position_3BN
    )


def with_blank_image(batch: Batch) -> Batch:
    """Return a batch whose forward runs the vision tower, though its rows may have no image."""
    if batch.images is not None:
        return batch
    none = torch.zeros(0, dtype=torch.int64, device=batch.ids_BN.device)
    return dataclasses.replace(batch, images=BatchImages((), none, none))


def grid_positions(sample: Sample) -> NDArray[np.int64]:
    """Return positions [3, N] of a sequence: an image takes those of its grid, text goes on after the largest."""
    size = len(sample.ids)
    position_3N = np.tile(np.arange(size), (3, 1))
    if not sample.images:
        return position_3N
    for image, at in zip(sample.images, image_positions(sample), strict=True):
        if image.grid is None or not len(at):
            continue
        time, height, width = image.grid
        merge = round((time * height * width / image.tokens) ** 0.5)
        height, width = height // merge, width // merge
        start = position_3N[0, at[0]]
        grid = np.indices((time, height, width)).reshape(3, -1) + start
        position_3N[:, at] = grid
        after = at[-1] + 1
        position_3N[:, after:] = grid.max() + 1 + np.arange(size - after)
    return position_3N
