"""Short blocks all along documents: every block of a document grows by one token a step, over the document's keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from upweight.engine import Engine
from upweight.engine.forward import base_of
from upweight.errors import UserError
from upweight.log import logger
from upweight.methods import EBFT
from upweight.models.modules import dropout_off
from upweight.sampler.decode import Decoder, Grid
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, Group, Sampling

_SCORES_AT_ONCE = 1 << 28  # numbers: attention scores of the documents that are sampled together
_SHOWN = 32  # tokens before a block that people get to see


def anchors(row: Any, method: EBFT) -> list[int]:
    """Where the blocks of a document begin: every token of the true block counts, so none lies in a prompt.

    `row` has `ids`, which of them are `scored`, and `prompt_length`.
    """
    scored, size = np.asarray(row["scored"], np.bool_), method.generate_max_len
    prompt = int(row["prompt_length"])
    # The first token of a text is not scored, since nothing predicts it: that is no prompt.
    first = max(method.context_length, (prompt if prompt > 1 else 0) + method.min_completion_prefix)
    starts = range(first, len(scored) - size + 1, method.stride)
    return [start for start in starts if scored[start : start + size].all()]


def with_blocks(rows: Any, method: EBFT, what: str) -> Any:
    """The documents of a dataset that have room for a block."""
    kept = [number for number in range(len(rows)) if anchors(rows[number], method)]
    if not kept:
        raise UserError(
            f"datasets: no document for {what} has {method.generate_max_len} tokens to compare with behind the "
            f"first {method.context_length} and its prompt. Lower 'ebft.generate_max_len' or 'ebft.context_length'."
        )
    if len(kept) < len(rows):
        logger.warning("%s: %d of %d documents are too short for a block", what, len(rows) - len(kept), len(rows))
    return rows.select(kept)


@dataclass
class StridedBlocks:
    """Fills groups, each of them a document: `count` samples of each block, block by block."""

    model: nn.Module
    engine: Engine
    method: EBFT
    generator: InProcess  # samples where prefixes cannot be shared, and knows the version of the policy
    decode: Callable[[list[int]], str]
    device: torch.device | None = None
    scores_at_once: int = _SCORES_AT_ONCE
    _decoder: Decoder | None = field(default=None, init=False)

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        starts = [anchors(group.row, self.method) for group in groups]
        self.generator.prove([group.prompt_ids for group in groups], sampling)
        if not self.generator.shares_prompts:
            self._separately(groups, starts, count, sampling)
        else:
            with torch.no_grad(), dropout_off(self.model):
                for first, stop in self._waves(groups, starts, count):
                    wave = replace(sampling, first=sampling.first + first)
                    self._together(groups[first:stop], starts[first:stop], count, wave)
        for place, (group, own) in enumerate(zip(groups, starts, strict=True)):
            size = sampling.max_new_tokens
            each = [start for start in own for _ in range(count)]
            group.extras = {
                "anchor": list(each),
                "prompt": [self.decode(group.prompt_ids[max(0, at - _SHOWN) : at]) for at in each],
                "ground_truth": [self.decode(group.prompt_ids[at : at + size]) for at in each],
            }
            if done is not None:
                done(place)

    def _waves(self, groups: Sequence[Group], starts: Sequence[Sequence[int]], count: int) -> list[tuple[int, int]]:
        """Neighbouring documents that fit together, as (first, stop)."""
        heads = base_of(self.model).config.get_text_config().num_attention_heads
        waves: list[tuple[int, int]] = []
        first = members = longest = 0
        for place, (group, own) in enumerate(zip(groups, starts, strict=True)):
            members, longest = max(members, len(own) * count), max(longest, len(group.prompt_ids))
            if place > first and (place + 1 - first) * members * longest * heads > self.scores_at_once:
                waves.append((first, place))
                first, members, longest = place, len(own) * count, len(group.prompt_ids)
        return [*waves, (first, len(groups))]

    def _together(
        self, groups: Sequence[Group], starts: Sequence[Sequence[int]], count: int, sampling: Sampling
    ) -> None:
        """Read each document once; then one more token for every block of all documents, until they are full."""
        device = self.device or base_of(self.model).device
        self._decoder = decoder = self._decoder or Decoder(base_of(self.model), device)
        room, members = sampling.max_new_tokens, max(len(own) for own in starts) * count
        documents = [group.prompt_ids[: own[-1]] for group, own in zip(groups, starts, strict=True)]
        anchor_GM = torch.ones(len(groups), members, dtype=torch.long)
        uniform_GMN = torch.zeros(len(groups), members, room, dtype=torch.float64)
        for place, own in enumerate(starts):
            anchor_GM[place, : len(own) * count] = torch.tensor(own).repeat_interleave(count)
            numbers = np.random.default_rng((sampling.seed or 0, sampling.first + place))
            drawn = numbers.random((len(own) * count, room))
            uniform_GMN[place, : len(drawn)] = torch.from_numpy(drawn)
        decoder.open(Grid(len(groups), members, max(map(len, documents)), room), sampling)
        decoder.prefill_branches(documents, anchor_GM, uniform_GMN.flatten(0, 1))
        for step in range(1, room):
            decoder.advance(step)
        ids = decoder.ids_NB.T.reshape(len(groups), members, room).tolist()
        logps = decoder.logps_NB.T.reshape(len(groups), members, room).tolist()
        version = [self.generator.version()] * room
        for place, (group, own) in enumerate(zip(groups, starts, strict=True)):
            group.completions = [
                Completion(ids[place][slot], logps[place][slot], version, finished=True)
                for slot in range(len(own) * count)
            ]

    def _separately(
        self, groups: Sequence[Group], starts: Sequence[Sequence[int]], count: int, sampling: Sampling
    ) -> None:
        """Each block as a completion of the text before it, for architectures that cannot share prefixes."""
        for place, (group, own) in enumerate(zip(groups, starts, strict=True)):
            seed = int(np.random.SeedSequence((sampling.seed or 0, sampling.first + place)).generate_state(1)[0])
            prefixes = [group.prompt_ids[:start] for start in own]
            found = self.generator.generate(prefixes, count, replace(sampling, seed=seed, first=0))
            group.completions = [replace(one, finished=True) for block in found for one in block]
