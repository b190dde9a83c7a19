"""Decoding on the device, with one KV cache of a prompt for all its completions, and one of each completion.

The model's modules run unchanged; only attention is replaced, by what the masks carry, through the same
interface as in training. A grid holds `groups` prompts with `members` completions each, in slots `group * members +
member`; all completions of a grid have the same number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.engine.attention.segments import SegmentPlan, segment_attention
from upweight.engine.packing import fold
from upweight.sampler.attention import Caches, CallAttention, cascade_attention
from upweight.sampler.draw import draw, only_draws
from upweight.sampler.forward import BufferPool, CachedForward
from upweight.sampler.image_prompts import text_ids
from upweight.types import Prompts, Sampling


@dataclass(frozen=True)
class Grid:
    """The shape of a batch in decoding; lengths are the longest that it holds."""

    groups: int
    members: int
    prompt_length: int
    completion_length: int


class Decoder:
    """The state of one grid on the device, and the steps that change it."""

    anchor_GM1: Tensor | None = None  # tokens of its prompt that each member sees; None: all of them

    def __init__(self, forward: CachedForward) -> None:
        self.forward, self.device = forward, forward.device
        self.arena = BufferPool(forward.device)
        self.grid = Grid(0, 0, 0, 0)
        self.sampling = Sampling(max_new_tokens=0)  # only the settings that change the draw of a token
        self.caches: list[Caches] = []  # by attention call
        # Where experts are recorded: of each prompt's tokens, and of the tokens that drew the newest ones.
        self.prompt_routes: list[Tensor] = []
        self.routes_BLA: Tensor | None = None
        self.prefilled_tokens = 0  # forwarded before tokens are drawn, in all calls

    def open(self, grid: Grid, sampling: Sampling) -> None:
        """Allocate a grid in the buffers."""
        self.grid, self.anchor_GM1 = grid, None
        self.sampling = only_draws(sampling)
        view, slots = self.arena.view, grid.groups * grid.members
        self.caches = []
        for number, layer in enumerate(self.forward.layers):
            shapes = [
                (count, layer.heads, length, width)
                for count, length in ((grid.groups, grid.prompt_length), (slots, grid.completion_length))
                for width in (layer.key_width, layer.value_width)
            ]
            kept = [view((number, part), shape, layer.dtype) for part, shape in enumerate(shapes)]
            self.caches.append((kept[0], kept[1], kept[2], kept[3]))
        self.length_G1 = view("length", (grid.groups, 1), torch.long)
        self.shift_G1 = view("shift", (grid.groups, 1), torch.long)
        self.step_1 = view("step", (1,), torch.long)
        self.token_B1 = view("token", (slots, 1), torch.long)
        self.uniform_BN = view("uniform", (slots, grid.completion_length), torch.float64)
        self.ids_NB = view("ids", (grid.completion_length, slots), torch.long)
        self.logps_NB = view("logps", (grid.completion_length, slots), torch.float32)
        self.seen_BV = None
        if sampling.repetition_penalty != 1:
            vocabulary = self.forward.base.config.get_text_config().vocab_size
            self.seen_BV = view("seen", (slots, vocabulary), torch.bool)

    def release(self) -> None:
        """Free the grid and its buffers."""
        self.caches.clear()
        self.arena.clear()
        self.open(Grid(0, 0, 0, 0), self.sampling)

    def load(self, prompts: Prompts, uniform_BN: Tensor) -> None:
        """Set the prompt lengths of an opened grid, and the random numbers of its completions."""
        # There may be fewer prompts than groups; the samples of the remaining groups are ignored.
        self.length_G1.fill_(1)
        self.length_G1[: len(prompts), 0] = torch.tensor([len(prompt) for prompt in prompts])
        self.shift_G1.zero_()
        if self.forward.shifts:
            self.shift_G1[: len(prompts), 0] = torch.tensor([self.forward.images.shift(prompt) for prompt in prompts])
        self.uniform_BN.zero_()
        self.uniform_BN[: len(uniform_BN), : uniform_BN.shape[1]] = uniform_BN
        self.step_1.fill_(-1)
        if self.seen_BV is not None:
            seen = self.seen_BV.zero_().view(self.grid.groups, self.grid.members, -1)
            for group, ids in enumerate(prompts):
                seen[group, :, torch.as_tensor(text_ids(ids), device=self.device)] = True

    def prefill(self, prompts: Prompts, prefill_tokens: int) -> None:
        """Forward the prompts, in chunks of at most `prefill_tokens` tokens, and draw the first tokens."""
        arrays = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
        length = np.array([len(ids) for ids in arrays])
        logits, start, self.prompt_routes = [], 0, []
        while start < len(arrays):
            fitting = int((length[start:].cumsum() <= prefill_tokens).sum())
            stop = start + max(1, fitting)
            logits.append(self._prefill_chunk(arrays[start:stop], start, list(length[start:stop, None] - 1)))
            start = stop
        logits.append(logits[0][:1].expand(self.grid.groups - len(arrays), -1))
        if self.prompt_routes:
            last_GLA = torch.stack([routes_PLA[-1] for routes_PLA in self.prompt_routes])
            self.routes_BLA = last_GLA.repeat_interleave(self.grid.members, 0)
        self._draw_tokens(torch.cat(logits).repeat_interleave(self.grid.members, 0))

    def prefill_branches(self, documents: Sequence[Sequence[int]], anchor_GM: Tensor, uniform_BN: Tensor) -> None:
        """Prefill the opened grid with documents, one at a time, and draw first tokens after the anchors."""
        self.anchor_GM1 = anchor_GM.to(self.device)[:, :, None]
        self.uniform_BN.copy_(uniform_BN)
        self.step_1.fill_(-1)
        logits = [
            self._prefill_chunk([np.asarray(ids, np.int64)], number, [anchor_M.numpy() - 1])
            for number, (ids, anchor_M) in enumerate(zip(documents, anchor_GM, strict=True))
        ]
        self._draw_tokens(torch.cat(logits))

    def _prefill_chunk(self, prompts: list[Any], start: int, positions: list[Any]) -> Tensor:
        """Store keys and values of some prompts in the grid; return the logits at the given positions of each."""
        forest = fold(prompts)
        self.prefilled_tokens += len(forest.ids_N)
        longest = max(len(ids) for ids in prompts)
        index = np.zeros((len(prompts), longest), np.int64)
        for row, path in zip(index, forest.paths, strict=True):
            row[: len(path)] = path
        ids_N, position_N, end_N, index_GP = (
            torch.from_numpy(x).to(self.device) for x in (forest.ids_N, forest.position_N, forest.end_N, index)
        )
        at = np.concatenate([path[columns] for path, columns in zip(forest.paths, positions, strict=True)])
        context = self._prefilling(end_N, position_N, slice(start, start + len(prompts)), index_GP)
        images = self.forward.images.inputs(prompts, forest, np.arange(len(forest.ids_N)), self.device)
        routes_NLA, at_T = self.forward.route_buffer(len(ids_N)), torch.from_numpy(at).to(self.device)
        out = self.forward.logits(ids_N[None], position_N[None], context, at_T, images, routes_NLA=routes_NLA)
        if routes_NLA is not None:
            self.prompt_routes += [routes_NLA[path] for path in forest.paths]
        return out

    def _prefilling(self, end_N: Tensor, position_N: Tensor, groups: slice, index_GP: Tensor) -> CallAttention:
        """Return attention over packed prompts, which also stores their keys and values in the grid."""
        plans: dict[Rule, SegmentPlan] = {}

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
            plan = plans.get(params.rule)
            if plan is None:
                plan = plans[params.rule] = SegmentPlan.of(end_N, position_N, params.rule)
            for kept, new in zip(self.caches[call][:2], (key, value), strict=True):
                kept[groups, :, : index_GP.shape[1]] = new[0][:, index_GP].transpose(0, 1)
            return segment_attention(query, key, value, plan, params)

        return attend

    def advance(self, width: int) -> None:
        """Sample one more token for every slot; `width` is an upper bound of the tokens in a completion."""
        bias: dict[Rule, Tensor] = {}

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
            """Store the key and value of the newest token of every slot, and attend to prompt and completion."""
            prompt_key, prompt_value, new_key, new_value = self.caches[call]
            new_key.index_copy_(2, self.step_1, key)
            new_value.index_copy_(2, self.step_1, value)
            if params.rule not in bias:
                bias[params.rule] = self.bias(params.rule, width)
            kept = prompt_key, prompt_value, new_key[:, :, :width], new_value[:, :, :width]
            return cascade_attention(query, kept, bias[params.rule], params)

        before_GM1 = self._tokens_before().expand(-1, self.grid.members, -1)
        position_B1 = (before_GM1 + self.shift_G1[:, None] + self.step_1).reshape(-1, 1)
        self.routes_BLA = self.forward.route_buffer(len(position_B1))
        logits = self.forward.logits(self.token_B1, position_B1, attend, None, routes_NLA=self.routes_BLA)
        self._draw_tokens(logits)

    def _draw_tokens(self, logits_BV: Tensor) -> None:
        """Draw a token for every slot, and store it in the next column."""
        self.step_1.add_(1)
        uniform_B = self.uniform_BN.index_select(1, self.step_1)[:, 0]
        token_B, logp_B = draw(logits_BV, uniform_B, self.sampling, self.seen_BV)
        self.token_B1.copy_(token_B[:, None])
        self.ids_NB.index_copy_(0, self.step_1, token_B[None])
        self.logps_NB.index_copy_(0, self.step_1, logp_B[None])
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, self.token_B1, True)

    def _tokens_before(self) -> Tensor:
        """Return the tokens before each completion, [groups, members, 1], or [groups, 1, 1] where they are equal."""
        return self.length_G1[:, None] if self.anchor_GM1 is None else self.anchor_GM1

    def bias(self, rule: Rule, width: int) -> Tensor:
        """Return the additive mask of each group: 0 for columns that its newest tokens see, else minus infinity."""
        before = self._tokens_before()
        column_K = torch.arange(self.grid.prompt_length + width, device=self.device)
        new_K = column_K - self.grid.prompt_length
        is_new_K = new_K >= 0
        position_GMK = torch.where(is_new_K, before + new_K, column_K)
        at_GM1 = before + self.step_1
        seen_GMK = torch.where(is_new_K, new_K <= self.step_1, column_K < before)
        if rule.window is not None:
            seen_GMK &= at_GM1 - position_GMK < rule.window
        if rule.chunk is not None:
            seen_GMK &= at_GM1 // rule.chunk == position_GMK // rule.chunk
        return torch.zeros(seen_GMK.shape, device=self.device).masked_fill_(~seen_GMK, -torch.inf)

    def keep(self, groups: Tensor, slots: Tensor) -> None:
        """Shrink the grid to some groups and slots, in the new order."""
        old = self.grid
        caches, length, token, shift = self.caches, self.length_G1, self.token_B1, self.shift_G1
        uniform, seen = self.uniform_BN, self.seen_BV
        self.open(Grid(len(groups), len(slots) // len(groups), old.prompt_length, old.completion_length), self.sampling)
        for old_parts, new_parts in zip(caches, self.caches, strict=True):
            for part, index in enumerate((groups, groups, slots, slots)):
                new_parts[part].copy_(old_parts[part].index_select(0, index))
        self.length_G1.copy_(length[groups])
        self.shift_G1.copy_(shift[groups])
        self.token_B1.copy_(token[slots])
        self.uniform_BN.copy_(uniform[slots])
        if seen is not None and self.seen_BV is not None:
            self.seen_BV.copy_(seen[slots])
