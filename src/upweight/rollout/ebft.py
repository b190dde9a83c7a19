"""Completions for EBFT: short blocks along documents, and assistant turns of known conversations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from upweight.data.images.records import image_refs
from upweight.errors import UserError
from upweight.log import logger
from upweight.methods import EBFT
from upweight.models.modules import dropout_off, unwrap_peft
from upweight.rollout.completion_source import CompletionSource, with_images
from upweight.rollout.episodes.token_stream import TokenStream, build_completion
from upweight.rollout.rollout import images_before
from upweight.sampler.decode import Decoder, Grid
from upweight.sampler.forward import CachedForward
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, Generator, Group, GroupDone, Sampling

_MAX_SCORES = 1 << 28  # attention scores of the documents that are sampled together
_SHOWN_CONTEXT = 32  # tokens before a block in the completions file
BlockStarts = Sequence[Sequence[int]]  # of each document
Conversations = list[tuple[int, Group, list[TokenStream]]]  # a group's number in the seed, and its token streams


@dataclass(frozen=True)
class KnownTurns(CompletionSource):
    """Fills groups turn by turn, the messages between the turns being the data's."""

    # A row's `truth_ids` alternates the true turns and these messages.

    generator: Generator | None  # None where another process samples
    end: int | None  # token that closes a turn which hit the length limit

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        assert self.generator is not None, "this process does not sample"
        prompts = [group.prompt_ids for group in groups]
        by_prompt = self.generator.generate(prompts, count, with_images(sampling, groups))
        conversations: Conversations = []
        for index, (group, completions) in enumerate(zip(groups, by_prompt, strict=True)):
            group.completions = completions
            streams = [TokenStream(group.prompt_ids) for _ in completions]
            for stream, completion in zip(streams, completions, strict=True):
                stream.append_sampled(completion)
            conversations.append((sampling.first + index, group, streams))
        turn = 0
        while conversations := [entry for entry in conversations if turn < len(_true_turns(entry[1]))]:
            self._sample_turn(self.generator, conversations, turn, sampling)
            turn += 1
        for index in range(len(groups)):
            if done is not None:
                done(index)

    def _sample_turn(self, generator: Generator, conversations: Conversations, turn: int, sampling: Sampling) -> None:
        """Append the next known messages to every conversation and sample one more turn of each."""
        for _, group, streams in conversations:
            for stream, completion in zip(streams, group.completions, strict=True):
                closing = [] if completion.finished or self.end is None else [self.end]
                stream.append_observation([*closing, *_true_turns(group)[turn]])
        seeds = [
            int(np.random.SeedSequence((sampling.seed or 0, turn, index, member)).generate_state(1)[0])
            for index, _, streams in conversations
            for member in range(len(streams))
        ]
        prompts = [stream.ids for *_, streams in conversations for stream in streams]
        members = [group for _, group, streams in conversations for _ in streams]
        seeded = with_images(replace(sampling, seeds=tuple(seeds)), members)
        sampled = iter(generator.generate(prompts, 1, seeded))
        for _, group, streams in conversations:
            group.completions = []
            for stream, (completion,) in zip(streams, sampled, strict=False):
                stream.append_sampled(completion)
                group.completions.append(build_completion(stream, group, finished=completion.finished))


def _true_turns(group: Group) -> list[list[int]]:
    return group.row["truth_ids"][1::2]


def anchors(row: Any, method: EBFT) -> list[int]:
    """Return where the blocks of a document (`ids`, `loss_mask`, `prompt_length`) begin, all inside the mask."""
    loss_mask, size = np.asarray(row["loss_mask"], np.bool_), method.generate_max_len
    prompt = int(row["prompt_length"])
    # The first token of a text is never in the mask, since nothing predicts it; that alone is no prompt.
    first = max(method.context_length, (prompt if prompt > 1 else 0) + method.min_completion_prefix)
    starts = range(first, len(loss_mask) - size + 1, method.stride)
    return [start for start in starts if loss_mask[start : start + size].all()]


def with_blocks(rows: Any, method: EBFT, what: str) -> Any:
    """Return the documents of a dataset that have room for a block."""
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
class StridedBlocks(CompletionSource):
    """Fills groups, one for each document, with `count` samples of each block, block by block."""

    # All blocks of a document decode in parallel and share its key-value cache.

    model: nn.Module
    method: EBFT
    generator: InProcess  # samples where prefixes cannot be shared, and has the policy version
    decode: Callable[[list[int]], str]
    device: torch.device | None = None
    max_scores: int = _MAX_SCORES
    _decoder: Decoder | None = field(default=None, init=False)

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        block_starts = [anchors(group.row, self.method) for group in groups]
        self.generator.check_sampling([group.prompt_ids for group in groups], with_images(sampling, groups))
        if not self.generator.shares_prefixes or any(image_refs(group.row) for group in groups):
            self._sample_separately(groups, block_starts, count, sampling)
        else:
            with torch.no_grad(), dropout_off(self.model):
                for first, stop in self._batches(groups, block_starts, count):
                    numbered = replace(sampling, first=sampling.first + first)
                    self._sample_batch(groups[first:stop], block_starts[first:stop], count, numbered)
        for index, (group, starts) in enumerate(zip(groups, block_starts, strict=True)):
            size = sampling.max_new_tokens
            anchor_each = [start for start in starts for _ in range(count)]
            group.extras = {
                "anchor": anchor_each,
                "prompt": [self.decode(group.prompt_ids[max(0, at - _SHOWN_CONTEXT) : at]) for at in anchor_each],
                "ground_truth": [self.decode(group.prompt_ids[at : at + size]) for at in anchor_each],
            }
            if done is not None:
                done(index)

    def _batches(self, groups: Sequence[Group], block_starts: BlockStarts, count: int) -> list[tuple[int, int]]:
        """Split the documents into (first, stop) ranges whose attention scores fit together."""
        heads = unwrap_peft(self.model).config.get_text_config().num_attention_heads
        batches: list[tuple[int, int]] = []
        first = members = longest = 0
        for index, (group, starts) in enumerate(zip(groups, block_starts, strict=True)):
            members, longest = max(members, len(starts) * count), max(longest, len(group.prompt_ids))
            if index > first and (index + 1 - first) * members * longest * heads > self.max_scores:
                batches.append((first, index))
                first, members, longest = index, len(starts) * count, len(group.prompt_ids)
        return [*batches, (first, len(groups))]

    def _sample_batch(self, groups: Sequence[Group], starts: BlockStarts, count: int, sampling: Sampling) -> None:
        """Prefill each document once, then decode one token of every block of all documents at each step."""
        device = self.device or unwrap_peft(self.model).device
        self._decoder = decoder = self._decoder or Decoder(CachedForward(unwrap_peft(self.model), device))
        block_length, members = sampling.max_new_tokens, max(len(each) for each in starts) * count
        documents = [group.prompt_ids[: each[-1]] for group, each in zip(groups, starts, strict=True)]
        anchor_GM = torch.ones(len(groups), members, dtype=torch.long)
        uniform_GMN = torch.zeros(len(groups), members, block_length, dtype=torch.float64)
        for index, each in enumerate(starts):
            anchor_GM[index, : len(each) * count] = torch.tensor(each).repeat_interleave(count)
            random = np.random.default_rng((sampling.seed or 0, sampling.first + index))
            uniform = random.random((len(each) * count, block_length))
            uniform_GMN[index, : len(uniform)] = torch.from_numpy(uniform)
        decoder.open(Grid(len(groups), members, max(map(len, documents)), block_length), sampling)
        decoder.prefill_branches(documents, anchor_GM, uniform_GMN.flatten(0, 1))
        for step in range(1, block_length):
            decoder.advance(step)
        ids = decoder.ids_NB.T.reshape(len(groups), members, block_length).tolist()
        logps = decoder.logps_NB.T.reshape(len(groups), members, block_length).tolist()
        version = [self.generator.version()] * block_length
        for group, each, *drawn in zip(groups, starts, ids, logps, strict=True):
            sampled = list(zip(*drawn, strict=True))[: len(each) * count]  # slots behind are unused
            group.completions = [Completion(tokens, its, version, finished=True) for tokens, its in sampled]

    def _sample_separately(self, groups: Sequence[Group], starts: BlockStarts, count: int, sampling: Sampling) -> None:
        """Sample each block as a completion of what is before it: after images, and where prefixes are not shared."""
        for index, (group, each) in enumerate(zip(groups, starts, strict=True)):
            seed = int(np.random.SeedSequence((sampling.seed or 0, sampling.first + index)).generate_state(1)[0])
            prefixes = [group.prompt_ids[:start] for start in each]
            seen = tuple(images_before(group, start) for start in each)
            alone = replace(sampling, seed=seed, first=0, images=seen if any(seen) else ())
            blocks = self.generator.generate(prefixes, count, alone)
            group.completions = [replace(completion, finished=True) for block in blocks for completion in block]
