"""Prompts with images: the numbers by which the sampler shares them, and what a forward reads in place of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upweight.engine.images import FIRST_IMAGE, batch_images, grid_positions, image_positions
from upweight.engine.packing import Forest
from upweight.models.processor import ImageReader
from upweight.types import ImageRef, Prompts, Sample

Ints = NDArray[np.int64]


class ImagePrompts:
    """The images of all prompts so far: two prompts share a beginning if their keys are equal, as pages are kept."""

    # A key is a token id or, for a placeholder, the number of its image: so the same in every call.

    def __init__(self, reader: ImageReader | None) -> None:
        self._reader = reader
        self._refs: list[ImageRef] = []
        self._numbers: dict[str, int] = {}

    def keys(self, prompts: Prompts, images: Sequence[tuple[ImageRef, ...]]) -> Prompts:
        """Return the keys of prompts; `images`: of each, or nothing where none has any."""
        if not any(images):
            return prompts
        return [self._key(prompt, refs) for prompt, refs in zip(prompts, images, strict=True)]

    def _key(self, prompt: Sequence[int], refs: tuple[ImageRef, ...]) -> list[int]:
        if not refs:
            return list(prompt)
        key = np.asarray(prompt, np.int64).copy()
        for ref, at in zip(refs, image_positions(_sample(key, refs)), strict=True):
            if ref.digest not in self._numbers:
                self._numbers[ref.digest] = len(self._refs)
                self._refs.append(ref)
            key[at] = FIRST_IMAGE + self._numbers[ref.digest]
        return key.tolist()

    def _sample(self, key: Ints) -> Sample:
        """Return the token ids and the images of a key, whose last image is whole."""
        at = np.flatnonzero(key >= FIRST_IMAGE)
        refs: list[ImageRef] = []
        first = 0
        while first < len(at):
            refs.append(self._refs[key[at[first]] - FIRST_IMAGE])
            first += refs[-1].tokens
        if not refs:
            return _sample(key, ())
        ids = key.copy()
        ids[at] = refs[0].token_id
        return _sample(ids, tuple(refs))

    def shift(self, key: Sequence[int]) -> int:
        """Return how far positions after a prompt are ahead of its tokens: less than 0 after images on a grid."""
        sample = self._sample(np.asarray(key, np.int64))
        if all(ref.grid is None for ref in sample.images):
            return 0
        return int(grid_positions(sample)[0, -1]) + 1 - len(key)

    def inputs(self, keys: Sequence[Ints], forest: Forest, new: Ints, device: torch.device) -> dict[str, Any] | None:
        """Return what stands for the images in a forward of the tokens `new` of some folded keys; None without any."""
        images = batch_images([self._sample(key) for key in keys], forest.paths, (1, len(forest.ids_N)))
        if images is None:
            return None
        assert self._reader is not None, "the sampler has nothing to read images with"
        at_I, feature_I = images.at_I.numpy(), images.feature_I.numpy()
        is_new_I = np.isin(at_I, new)
        at_I, feature_I = np.searchsorted(new, at_I[is_new_I]), feature_I[is_new_I]
        # An image whose tokens are all in pages already is not read again.
        stop_R = np.cumsum([ref.tokens for ref in images.refs])
        ref_I = np.searchsorted(stop_R, feature_I, side="right")
        read = np.unique(ref_I)
        refs = [images.refs[number] for number in read]
        start_R = np.cumsum([0, *(ref.tokens for ref in refs)])[:-1]
        before_R = stop_R - [ref.tokens for ref in images.refs]
        feature_I = feature_I - before_R[ref_I] + start_R[np.searchsorted(read, ref_I)] if len(read) else feature_I
        position_3BN = None if images.position_3BN is None else images.position_3BN[:, :, torch.from_numpy(new)]
        pixels = self._reader.inputs(refs) if refs else None
        return {
            "inputs": None if pixels is None else {name: value.to(device) for name, value in pixels.items()},
            "at_I": torch.from_numpy(at_I).to(device),
            "feature_I": torch.from_numpy(feature_I).to(device),
            "position_3BN": None if position_3BN is None else position_3BN.to(device),
        }


def _sample(ids: Ints, refs: tuple[ImageRef, ...]) -> Sample:
    return Sample(ids, np.zeros(len(ids), np.bool_), images=refs)


def text_ids(key: Sequence[int]) -> list[int]:
    """Return the token ids of a key without those that stand for images."""
    return [number for number in key if number < FIRST_IMAGE]
