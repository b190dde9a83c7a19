"""Sampling in grids: prompts with all their completions, which draw their tokens at the same time; see `decode.py`.

On a CPU, where launches cost little, products over groups that share a prompt are faster than slots with pages.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upweight.sampler.collect import CompletionCollector, smaller_grid
from upweight.sampler.decode import Decoder, Grid
from upweight.types import Prompts, Sampling

_SHRINK_BELOW = 0.9  # the share of slots that a smaller grid has at most


class GridSampler:
    """Draws completions in grids, as many prompts at a time as fit into memory."""

    compile_seconds = 0.0  # nothing is compiled

    def __init__(self, decoder: Decoder, prefill_tokens: int) -> None:
        self._decoder, self._prefill_tokens = decoder, prefill_tokens

    @property
    def prefilled_tokens(self) -> int:
        """Return the tokens that were forwarded before others were drawn, in all calls."""
        return self._decoder.prefilled_tokens

    def forget(self) -> None:
        """Do nothing: keys and values are not kept over calls."""

    def bytes(self) -> int:
        """Return the memory that is held."""
        return self._decoder.arena.bytes()

    def release(self) -> None:
        """Free all memory; the next call takes it again."""
        self._decoder.release()

    def sample(
        self, prompts: Prompts, sampling: Sampling, uniform_SN: Tensor, rows: CompletionCollector, cache_bytes: int
    ) -> None:
        """Draw the completions of all prompts into `rows`; keys and values take at most `cache_bytes`."""
        tokens = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens * rows.count
        most = max(1, cache_bytes // (self._decoder.forward.token_bytes() * tokens))
        for wave in np.array_split(np.arange(len(prompts)), math.ceil(len(prompts) / most)):
            self._sample_wave(prompts, wave, sampling, uniform_SN, rows)

    def _sample_wave(
        self, prompts: Prompts, wave: NDArray[np.int64], sampling: Sampling, uniform_SN: Tensor,
        rows: CompletionCollector,
    ) -> None:  # fmt: skip
        """Sample the completions of some prompts."""
        chosen = [prompts[number] for number in wave]
        slots = wave[:, None] * rows.count + np.arange(rows.count)
        longest = max(len(prompt) for prompt in chosen)
        decoder = self._decoder
        decoder.open(Grid(len(wave), rows.count, longest, sampling.max_new_tokens), sampling)
        decoder.load(chosen, uniform_SN[torch.from_numpy(slots.reshape(-1))])
        decoder.prefill(chosen, self._prefill_tokens)
        for number, routes_PLA in zip(wave.tolist(), decoder.prompt_routes, strict=False):
            rows.take_prompt_routes(number, routes_PLA[:-1].numpy())
        for column in range(sampling.max_new_tokens):
            if column:
                decoder.advance(column)
            ids_1B, logps_1B = (x[column : column + 1].numpy().copy() for x in (decoder.ids_NB, decoder.logps_NB))
            routes_1BLA = None if decoder.routes_BLA is None else decoder.routes_BLA[None].numpy()
            rows.take(column, ids_1B, logps_1B, slots, routes_1BLA)
            if not rows.alive_S[slots[slots >= 0]].any():
                return
            slots = self._shrink_grid(slots, rows)

    def _shrink_grid(self, slots: NDArray[np.int64], rows: CompletionCollector) -> NDArray[np.int64]:
        """Drop finished groups and members from the grid where that pays; return the rows in its slots."""
        smaller = smaller_grid(slots, rows.alive_S, _SHRINK_BELOW)
        if slots.size == 1 or smaller is None:
            return slots
        groups, kept, slots = smaller
        self._decoder.keep(torch.from_numpy(groups), torch.from_numpy(kept))
        return slots
