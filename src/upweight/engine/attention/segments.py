"""Tree attention without a special kernel: each unbranched segment attends to its ancestors and itself by SDPA."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from upweight.engine.attention.rules import AttentionParams, Rule

_LONGEST_WINDOWED_SEGMENT = 256  # shorter than the window saves nothing, longer computes masked scores


@dataclass(eq=False)
class AttentionCall:
    """Segments of one shape that attend in one call; `keys` lists for each the segments it sees, itself last."""

    segments: list[int]
    keys: list[list[int]]
    size: int  # queries: the last tokens of each path
    width: int  # keys
    offset: int  # of the first query in its chunk
    rule: Rule
    _bias: dict[tuple[int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    @property
    def is_causal(self) -> bool:
        """Return whether each token of a path sees all before it, and no other mask is needed."""
        limited = self.rule.chunk is not None or (self.rule.window is not None and self.rule.window < self.width)
        return self.size == self.width and not limited

    @property
    def is_suffix(self) -> bool:
        """Return whether the last tokens of paths see all before them."""
        return self.rule == Rule() and self.size < self.width

    @cached_property
    def visible_QK(self) -> Tensor:
        """Return which keys of a path its queries see."""
        before = self.width - self.size
        query_Q1, key_K = torch.arange(before, self.width)[:, None], torch.arange(self.width)
        seen = key_K <= query_Q1
        if self.rule.window is not None:
            seen &= query_Q1 - key_K < self.rule.window
        if self.rule.chunk is not None:
            shift = self.offset + self.rule.chunk * self.width - before  # the first query stands at `offset`
            seen &= (query_Q1 + shift) // self.rule.chunk == (key_K + shift) // self.rule.chunk
        return seen

    def bias(self, repeat: int, like: Tensor) -> Tensor:
        """Return the mask as an additive bias, repeated for the query heads that share a key head."""
        key = (repeat, like.dtype, like.device)
        if key not in self._bias:
            hidden = ~self.visible_QK.to(like.device)
            bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, float("-inf"))
            self._bias[key] = bias.repeat(repeat, 1)
        return self._bias[key]


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """The sizes of a row's segments, those that have queries, and the attention calls that cover these."""

    sizes: list[int]
    queried: list[int]
    calls: list[AttentionCall]

    @staticmethod
    def of(end_N: Tensor, position_N: Tensor, rule: Rule, queried_N: NDArray[np.bool_] | None = None) -> "SegmentPlan":
        """Build the plan of a row; positions rise by one along every path. `queried_N`: tokens with queries, or all."""
        starts, sizes, ancestors = _segments(end_N.cpu().numpy(), rule, queried_N)
        position = position_N.cpu().numpy()
        queried = [number for number, start in enumerate(starts) if queried_N is None or queried_N[start]]
        by_shape: dict[tuple[int, int, int], list[tuple[int, list[int]]]] = {}
        for number in queried:
            size, first = sizes[number], int(position[starts[number]])
            keys = _within_reach(ancestors[number], sizes, rule, first)
            width = size + sum(sizes[k] for k in keys)
            offset = first % rule.chunk if rule.chunk else 0
            by_shape.setdefault((size, width, offset), []).append((number, [*keys, number]))
        calls = [
            AttentionCall([n for n, _ in members], [keys for _, keys in members], size, width, offset, rule)
            for (size, width, offset), members in by_shape.items()
        ]
        return SegmentPlan(sizes, queried, calls)


def _segments(
    end_N: NDArray[np.int64], rule: Rule, queried_N: NDArray[np.bool_] | None
) -> tuple[list[int], list[int], list[list[int]]]:
    """Return starts, sizes and ancestors (root first) of unbranched segments, cut shorter for windows and chunks.

    Segments are also cut where tokens with queries begin or end.
    """
    changes = np.diff(end_N) != 0
    if queried_N is not None:
        changes |= np.diff(queried_N)
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(end_N)]
    limit = rule.window or rule.chunk
    if limit is not None:
        longest = max(limit, _LONGEST_WINDOWED_SEGMENT)
        cuts = [at for a, b in pairwise(cuts) for at in range(a, b, longest)] + [len(end_N)]
    starts = cuts[:-1]
    ancestors: list[list[int]] = []
    path: list[int] = []
    for number, start in enumerate(starts):
        while path and end_N[starts[path[-1]]] <= start:
            path.pop()
        ancestors.append(path.copy())
        path.append(number)
    return starts, [b - a for a, b in pairwise(cuts)], ancestors


def _within_reach(ancestors: Sequence[int], sizes: Sequence[int], rule: Rule, first_position: int) -> list[int]:
    """Return the ancestors that some token of a segment beginning at `first_position` can still see."""
    if rule.window is not None:
        reach = rule.window - 1
    elif rule.chunk is not None:
        reach = first_position % rule.chunk
    else:
        return list(ancestors)
    kept: list[int] = []
    for number in reversed(ancestors):
        if reach <= 0:
            break
        kept.append(number)
        reach -= sizes[number]
    return kept[::-1]


def segment_attention(query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, params: AttentionParams) -> Tensor:
    """Attend over a row of trees; query [1, heads, N, width], key and value with as many or fewer heads.

    The query has the tokens of segments with queries only, in their order, and so has the output.
    """
    # One split for each of q, k, v: its backward is one concatenation, where slices would each write a whole row.
    keys, values = (x.split(plan.sizes, 2) for x in (key, value))
    parts = query.split([plan.sizes[segment] for segment in plan.queried], 2)
    queries = dict(zip(plan.queried, parts, strict=True))
    out: dict[int, Tensor] = {}
    for call in plan.calls:
        q = _concat([queries[s] for s in call.segments], 0)
        k, v = (_concat([_concat([x[i] for i in seen], 2) for seen in call.keys], 0) for x in (keys, values))
        out |= zip(call.segments, _attend(q, k, v, call, params).split(1, 0), strict=True)
    return torch.cat([out[segment] for segment in plan.queried], 2)


def _concat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, params: AttentionParams) -> Tensor:
    """Compute one call; query heads that share a key head lie along the query axis, so that keys are never copied."""
    rows, heads, size, _ = q.shape
    repeat = heads // k.shape[1]
    plain = params.softcap is None and params.sinks is None
    if plain and call.is_causal:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=params.scaling, enable_gqa=repeat > 1)
    if plain and call.is_suffix and _takes_suffixes(q):
        suffix: Any = causal_lower_right(size, k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, suffix, scale=params.scaling, enable_gqa=repeat > 1)
    q = q.reshape(rows, k.shape[1], repeat * size, q.shape[-1])
    if plain:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=call.bias(repeat, q), scale=params.scaling)
    else:
        out = _softmax_by_steps(q, k, v, call, params)
    return out.reshape(rows, heads, size, v.shape[-1])


def _takes_suffixes(q: Tensor) -> bool:
    """Return whether a kernel computes the last queries of a path without a mask, which would be as large as scores."""
    return q.is_cuda and q.dtype != torch.float32 and not q.requires_grad


def _softmax_by_steps(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, params: AttentionParams) -> Tensor:
    """Compute the softmax step by step, for what SDPA cannot do: capped scores and attention sinks."""
    repeat = q.shape[2] // len(call.visible_QK)
    scores = (q @ k.transpose(-1, -2)).float() * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores + call.bias(repeat, scores)
    if params.sinks is not None:
        per_head = params.sinks.float().view(1, k.shape[1], repeat, 1, 1)
        column = per_head.expand(q.shape[0], -1, -1, q.shape[2] // repeat, 1).reshape(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
