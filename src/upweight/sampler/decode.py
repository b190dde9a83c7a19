"""Decoding on the device, with one KV cache of a prompt for all its completions, and one of each completion.

The model's modules run unchanged; only attention is replaced, by what the masks carry, through the same
interface as in training. A grid holds `groups` prompts with `members` completions each, in slots `group * members +
member`; all completions of a grid have the same number of tokens.
"""

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upweight.engine.attention.interface import tree_masks, use_tree_attention
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.engine.attention.segments import SegmentPlan, segment_attention
from upweight.engine.logits import LogitTransform
from upweight.engine.packing import fold
from upweight.models.modules import backbone_of
from upweight.sampler.attention import Caches, CallAttention, attention_op, cascade_attention
from upweight.sampler.draw import draw
from upweight.types import Prompts, Sampling

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.sampler.attention_kernel import cascade_step
else:
    cascade_step = None


@dataclass(frozen=True)
class Grid:
    """The shape of a batch in decoding; lengths are the longest that it holds."""

    groups: int
    members: int
    prompt_length: int
    completion_length: int


@dataclass(frozen=True)
class LayerShape:
    """The keys and values that one attention call of a forward caches for a token."""

    module: nn.Module
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype


class BufferPool:
    """Named buffers with views of any shape; a view keeps its address until a larger one is requested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved = 0  # counts changes of address
        self._buffers: dict[Any, Tensor] = {}

    def view(self, name: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a view of the buffer's beginning, with the values of earlier uses, or zeros."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            self.moved += 1
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return buffer[:size].view(*shape)

    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()
        self.moved += 1


class _Shapes:
    """Records the shapes of each attention call without attending; it is the tree itself."""

    def __init__(self, position_BN: Tensor) -> None:
        self.layers: list[LayerShape] = []
        self.position_BN = position_BN

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.layers.append(LayerShape(module, key.shape[1], key.shape[-1], value.shape[-1], key.dtype))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


class Decoder:
    """The state of one grid on the device, and the steps that change it."""

    anchor_GM1: Tensor | None = None  # tokens of its prompt that each member sees; None: all of them

    def __init__(self, base: PreTrainedModel, device: torch.device) -> None:
        self.base, self.device = base, device
        self.arena = BufferPool(device)
        self.draw = draw
        self.grid = Grid(0, 0, 0, 0)
        self.sampling = Sampling(max_new_tokens=0)  # only the settings that change the draw of a token
        # Both by attention call: some models attend with one module more than once in a forward.
        self.caches: list[Caches] = []
        self.layers: list[LayerShape] = []
        self._padded: dict[tuple[int, int], CallAttention] = {}

    def token_bytes(self) -> int:
        """Return the bytes that one token takes in the caches of all layers."""
        if not self.layers:
            use_tree_attention(self.base)
            zero_11 = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            shapes = _Shapes(zero_11)
            self._logits(zero_11, zero_11, shapes, None)
            self.layers = shapes.layers
        return sum(layer.heads * (layer.key_width + layer.value_width) * layer.dtype.itemsize for layer in self.layers)

    def open(self, grid: Grid, sampling: Sampling) -> None:
        """Allocate a grid in the buffers."""
        use_tree_attention(self.base)
        self.token_bytes()
        self.grid, self.anchor_GM1 = grid, None
        self.sampling = replace(sampling, max_new_tokens=0, stop_ids=(), stop_strings=(), seed=None, first=0)
        view, slots = self.arena.view, grid.groups * grid.members
        self.caches = []
        for number, layer in enumerate(self.layers):
            shapes = [
                (count, layer.heads, length, width)
                for count, length in ((grid.groups, grid.prompt_length), (slots, grid.completion_length))
                for width in (layer.key_width, layer.value_width)
            ]
            kept = [view((number, part), shape, layer.dtype) for part, shape in enumerate(shapes)]
            self.caches.append((kept[0], kept[1], kept[2], kept[3]))
        self.ids_GP = view("prompts", (grid.groups, grid.prompt_length), torch.long)
        self.length_G1 = view("length", (grid.groups, 1), torch.long)
        self.step_1 = view("step", (1,), torch.long)
        self.token_B1 = view("token", (slots, 1), torch.long)
        self.uniform_BN = view("uniform", (slots, grid.completion_length), torch.float64)
        self.ids_NB = view("ids", (grid.completion_length, slots), torch.long)
        self.logps_NB = view("logps", (grid.completion_length, slots), torch.float32)
        self.seen_BV = None
        if sampling.repetition_penalty != 1:
            vocabulary = self.base.config.get_text_config().vocab_size
            self.seen_BV = view("seen", (slots, vocabulary), torch.bool)

    def release(self) -> None:
        """Free the grid and its buffers."""
        self.caches.clear()
        self.arena.clear()
        self._padded.clear()
        self.open(Grid(0, 0, 0, 0), self.sampling)

    def load(self, prompts: Prompts, uniform_BN: Tensor) -> None:
        """Set the prompt lengths of an opened grid, and the random numbers of its completions."""
        # There may be fewer prompts than groups; the samples of the remaining groups are ignored.
        self.length_G1.fill_(1)
        self.length_G1[: len(prompts), 0] = torch.tensor([len(prompt) for prompt in prompts])
        self.uniform_BN.zero_()
        self.uniform_BN[: len(uniform_BN), : uniform_BN.shape[1]] = uniform_BN
        self.step_1.fill_(-1)
        if self.seen_BV is not None:
            seen = self.seen_BV.zero_().view(self.grid.groups, self.grid.members, -1)
            for group, ids in enumerate(prompts):
                seen[group, :, torch.as_tensor(ids, device=self.device)] = True

    def prefill(self, prompts: Prompts, prefill_tokens: int) -> None:
        """Forward the prompts, in chunks of at most `prefill_tokens` tokens, and draw the first tokens."""
        arrays = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
        length = np.array([len(ids) for ids in arrays])
        logits, start = [], 0
        while start < len(arrays):
            fitting = int((length[start:].cumsum() <= prefill_tokens).sum())
            stop = start + max(1, fitting)
            logits.append(self._prefill_chunk(arrays[start:stop], start, list(length[start:stop, None] - 1)))
            start = stop
        logits.append(logits[0][:1].expand(self.grid.groups - len(arrays), -1))
        self._draw_tokens(torch.cat(logits).repeat_interleave(self.grid.members, 0))

    def pad(self, prompts: Prompts) -> None:
        """Copy prompts to the device for `prefill_padded`, each in a row of the grid's length."""
        ids_GP = np.zeros(self.ids_GP.shape, np.int64)
        for row, prompt in zip(ids_GP, prompts, strict=False):
            row[: len(prompt)] = prompt
        self.ids_GP.copy_(torch.from_numpy(ids_GP))

    def prefill_padded(self) -> None:
        """Forward the padded prompts and draw the first tokens, by the same kernels for any prompts."""
        groups, length = self.grid.groups, self.grid.prompt_length
        if (groups, length) not in self._padded:
            row_N = torch.arange(groups * length)
            slots = slice(0, groups), row_N.view(groups, length).to(self.device)
            self._padded[groups, length] = self._prefilling((row_N // length + 1) * length, row_N % length, *slots)
        position_GP = torch.arange(length, device=self.device).expand(groups, length)
        last_G = torch.arange(groups, device=self.device) * length + self.length_G1[:, 0] - 1
        context = self._padded[groups, length]
        logits_GV = self._logits(self.ids_GP.view(1, -1), position_GP.reshape(1, -1), context, last_G)
        self._draw_tokens(logits_GV.repeat_interleave(self.grid.members, 0))

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
        longest = max(len(ids) for ids in prompts)
        index = np.zeros((len(prompts), longest), np.int64)
        for row, path in zip(index, forest.paths, strict=True):
            row[: len(path)] = path
        ids_N, position_N, end_N, index_GP = (
            torch.from_numpy(x).to(self.device) for x in (forest.ids_N, forest.position_N, forest.end_N, index)
        )
        at = np.concatenate([path[columns] for path, columns in zip(forest.paths, positions, strict=True)])
        context = self._prefilling(end_N, position_N, slice(start, start + len(prompts)), index_GP)
        return self._logits(ids_N[None], position_N[None], context, torch.from_numpy(at).to(self.device))

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
            prompt_key, prompt_value, new_key, new_value = caches = self.caches[call]
            if cascade_step is not None and query.is_cuda and self.anchor_GM1 is None:
                return cascade_step(query, key, value, caches, (self.length_G1, self.step_1), params)
            new_key.index_copy_(2, self.step_1, key)
            new_value.index_copy_(2, self.step_1, value)
            if params.rule not in bias:
                bias[params.rule] = self.bias(params.rule, width)
            kept = prompt_key, prompt_value, new_key[:, :, :width], new_value[:, :, :width]
            return cascade_attention(query, kept, bias[params.rule], params)

        before_GM1 = self._tokens_before().expand(-1, self.grid.members, -1)
        position_B1 = (before_GM1 + self.step_1).reshape(-1, 1)
        self._draw_tokens(self._logits(self.token_B1, position_B1, attend, None))

    def _draw_tokens(self, logits_BV: Tensor) -> None:
        """Draw a token for every slot, and store it in the next column."""
        self.step_1.add_(1)
        uniform_B = self.uniform_BN.index_select(1, self.step_1)[:, 0]
        token_B, logp_B = self.draw(logits_BV, uniform_B, self.sampling, self.seen_BV)
        self.token_B1.copy_(token_B[:, None])
        self.ids_NB.index_copy_(0, self.step_1, token_B[None])
        self.logps_NB.index_copy_(0, self.step_1, logp_B[None])
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, self.token_B1, True)

    def _logits(self, ids_BN: Tensor, position_BN: Tensor, calls: CallAttention | _Shapes, at: Tensor | None) -> Tensor:
        """Return logits at flat positions, or at all, through the head's forward and the engine's logit transform."""
        inputs: dict[str, Any] = {"input_ids": ids_BN, "position_ids": position_BN, "use_cache": False}
        inputs["attention_mask"] = torch.ones_like(ids_BN)
        params = self.base.__dict__["_logit_transform"]
        attention = nullcontext(calls) if isinstance(calls, _Shapes) else attention_op(calls, position_BN)
        with attention as tree, tree_masks(tree):
            if params is None:
                stock = self.base.__dict__["_stock_forward"]
                can_select = "logits_to_keep" in inspect.signature(type(self.base).forward).parameters
                kept = {"logits_to_keep": at} if can_select and at is not None else {}
                logits = stock(**inputs, **kept).logits.flatten(0, 1)
                return logits if can_select or at is None else logits[at]
            hidden = backbone_of(self.base)(**inputs)[0].flatten(0, 1)
        head: Any = self.base.get_output_embeddings()
        projected = head(hidden if at is None else hidden[at])
        return projected if params == LogitTransform() else params(projected.float())

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
        caches, length, token = self.caches, self.length_G1, self.token_B1
        uniform, seen = self.uniform_BN, self.seen_BV
        self.open(Grid(len(groups), len(slots) // len(groups), old.prompt_length, old.completion_length), self.sampling)
        for old_parts, new_parts in zip(caches, self.caches, strict=True):
            for part, index in enumerate((groups, groups, slots, slots)):
                new_parts[part].copy_(old_parts[part].index_select(0, index))
        self.length_G1.copy_(length[groups])
        self.token_B1.copy_(token[slots])
        self.uniform_BN.copy_(uniform[slots])
        if seen is not None and self.seen_BV is not None:
            self.seen_BV.copy_(seen[slots])
