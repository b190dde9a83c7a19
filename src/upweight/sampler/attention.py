"""Attention of the sampler: of the newest token of each completion, and of calls inside compiled layers.

A compiled layer has no graph break where attention is one custom operation. All layers of a model share one compiled
forward, so an operation cannot take the calling layer as an argument: calls are identified by their order, which is the
same in every forward. A module that attends more than once in a forward has as many calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.models.modules import context_value

# Keys and values of prompts [groups, key heads, P, width] and of completions [slots, key heads, L, width].
Caches = tuple[Tensor, Tensor, Tensor, Tensor]
# The call's number in a forward, query [B, heads, N, width], key and value of as many or fewer heads -> like the query.
CallAttention = Callable[[int, Tensor, Tensor, Tensor, AttentionParams], Tensor]


class Rotation(NamedTuple):
    """The rotation of queries and keys by position, [slots, 1, width] each, and the weights of norms before it."""

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 0.0


@runtime_checkable
class RotatingAttention(Protocol):
    """Attention that also takes queries and keys as their projections give them."""

    def __call__(self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attend with query and key as they are."""
        ...

    def attend_rotated(  # noqa: PLR0917 - as `CallAttention`, with one argument more
        self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, rotation: Rotation
    ) -> Tensor:
        """Norm and rotate query and key, and attend."""
        ...


class CustomAttention:
    """The tree of one forward: it passes each attention call on with its number."""

    def __init__(self, context: CallAttention, position_BN: Tensor) -> None:
        self.context, self.calls, self.position_BN = context, count(), position_BN

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute the attention of one layer, see `LayerAttention`."""
        if torch.compiler.is_compiling():
            rule = params.rule
            return _attend(query, key, value, params.scaling, params.softcap, params.sinks, rule.window, rule.chunk)
        return self.context(next(self.calls), query, key, value, params)


_running: ContextVar[CustomAttention] = ContextVar("running")


@contextmanager
def attention_op(context: CallAttention, position_BN: Tensor) -> Iterator[CustomAttention]:
    """Yield the tree for one forward of these positions, so that compiled layers attend by `context`."""
    attention = CustomAttention(context, position_BN)
    with context_value(_running, attention):
        yield attention


def running_attention() -> tuple[int, CallAttention]:
    """Return the number of the next attention call in the forward that runs, and what computes it."""
    running = _running.get()
    return next(running.calls), running.context


@torch.library.custom_op("upweight::attend", mutates_args=())
def _attend(  # noqa: PLR0917 - an operation takes tensors and numbers
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    chunk: int | None,
) -> Tensor:
    forward, params = _running.get(), AttentionParams(Rule(window, chunk), scaling, softcap, sinks)
    out = forward.context(next(forward.calls), query, key, value, params)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@_attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    slots, heads, length, _width = query.shape
    return query.new_empty(slots, length, heads, value.shape[-1]).transpose(1, 2)


def cascade_attention(query: Tensor, caches: Caches, bias_GMK: Tensor, params: AttentionParams) -> Tensor:
    """Attend with a query [slots, heads, 1, width]; the output has the same axes.

    `bias_GMK` is added to the scores of a group's P + L columns; M is 1 where all members see the same. The slots of a
    group are adjacent: they lie along the query axis of one product with their prompt's keys, so no key is copied.
    """
    plain = params.rule == Rule() and params.softcap is None and params.sinks is None
    if plain and not query.is_cuda and caches[0].shape[-1] == caches[1].shape[-1]:
        return _merge_two_calls(query, caches, bias_GMK, params.scaling)
    return _softmax_by_steps(query, caches, bias_GMK, params)


def _merge_two_calls(query: Tensor, caches: Caches, bias_GMK: Tensor, scaling: float) -> Tensor:
    """Combine two calls of the CPU's fused attention by their log-sum-exps."""
    prompt_key, prompt_value, new_key, new_value = caches
    slots, heads, _, _ = query.shape
    groups, key_heads, length, _ = prompt_key.shape
    members, repeat = slots // groups, heads // key_heads
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias_GMP = bias_GMK[:, :, :length].to(query.dtype)
    if bias_GMP.shape[1] > 1:
        bias_GMP = bias_GMP.repeat_interleave(repeat, 1)
    shared = query.reshape(groups, members, key_heads, repeat, -1).transpose(1, 2).flatten(2, 3)
    attended = attend(shared, prompt_key, prompt_value, attn_mask=bias_GMP[:, None], scale=scaling)
    on_prompt, log_prompt = (x.unflatten(2, (members, repeat)).transpose(1, 2).flatten(0, 1) for x in attended)
    by_slot = query.reshape(slots, key_heads, repeat, -1)
    on_new, log_new = attend(by_slot, new_key, new_value, scale=scaling)
    share = torch.sigmoid(log_new - log_prompt)[..., None].to(query.dtype)
    return torch.lerp(on_prompt, on_new, share).reshape(slots, heads, 1, -1)


def _softmax_by_steps(query: Tensor, caches: Caches, bias_GMK: Tensor, params: AttentionParams) -> Tensor:
    """Compute the softmax step by step, for windows, capped scores and attention sinks."""
    prompt_key, prompt_value, new_key, new_value = caches
    slots, heads, _, _ = query.shape
    groups, key_heads, length, _ = prompt_key.shape
    members, repeat = slots // groups, heads // key_heads
    by_member = (groups, members, key_heads, repeat, -1)
    by_head = (groups, key_heads, members, repeat, -1)
    shared = query.reshape(by_member).transpose(1, 2).reshape(groups, key_heads, members * repeat, -1)
    to_prompt = (shared @ prompt_key.transpose(-1, -2)).view(by_head).transpose(1, 2)
    to_new = (query.reshape(slots, key_heads, repeat, -1) @ new_key.transpose(-1, -2)).view(by_member)
    scores = torch.cat([to_prompt, to_new], -1).float().mul_(params.scaling)
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores += bias_GMK[:, :, None, None]
    if params.sinks is not None:
        column = params.sinks.float().view(1, 1, key_heads, repeat, 1).expand(groups, members, -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    share = scores.softmax(-1).to(query.dtype)
    on_prompt = share[..., :length].transpose(1, 2).reshape(groups, key_heads, -1, length) @ prompt_value
    end = length + new_key.shape[2]
    on_new = share[..., length:end].reshape(slots, key_heads, repeat, -1) @ new_value
    out = on_prompt.view(by_head).transpose(1, 2) + on_new.view(by_member)
    return out.reshape(slots, heads, 1, -1)


def paged_attention(
    query: Tensor, pools: tuple[Tensor, Tensor], table_BT: Tensor, length_B: Tensor, params: AttentionParams
) -> Tensor:
    """Attend with a query [slots, heads, 1, width] to the keys of each slot up to position `length_B`, its newest.

    `pools`: keys and values [pages, key heads, tokens of a page, width]; `table_BT`: the pages of each slot, in order.
    """
    size = pools[0].shape[2]
    used = int(length_B.max()) // size + 1
    table_BT = table_BT[:, :used].long()
    key, value = (pool[table_BT].transpose(1, 2).flatten(2, 3) for pool in pools)  # [slots, heads, K, width]
    column_K = torch.arange(used * size, device=query.device)
    seen_BK = column_K <= length_B[:, None]
    if params.rule.window is not None:
        seen_BK &= length_B[:, None] - column_K < params.rule.window
    if params.rule.chunk is not None:
        seen_BK &= length_B[:, None] // params.rule.chunk == column_K // params.rule.chunk
    slots, heads, _, _ = query.shape
    by_head = query.reshape(slots, key.shape[1], heads // key.shape[1], -1)
    scores = (by_head @ key.transpose(-1, -2)).float().mul_(params.scaling)
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill_(~seen_BK[:, None, None], -torch.inf)
    if params.sinks is not None:
        column = params.sinks.float().view(1, *by_head.shape[1:3], 1).expand(slots, -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    share = scores.softmax(-1)[..., : len(column_K)].to(query.dtype)
    return (share @ value).reshape(slots, heads, 1, -1)
