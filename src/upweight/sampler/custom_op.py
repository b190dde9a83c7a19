"""The sampler's attention as one custom operation, so that a compiled layer has no graph break.

All layers of a model share one compiled forward, so an operation cannot take the calling layer as an argument: calls
are identified by their order, which is the same in every forward. A module that attends more than once in a forward
has as many calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Protocol

import torch
from torch import Tensor, nn

from upweight.engine.attention.rules import AttentionParams, Rule


class CallAttention(Protocol):
    """Computes the attention of every call in a forward of the sampler; `call` is the number of the call."""

    def attend(self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Query [B, heads, N, width], key and value with as many or fewer heads -> [B, heads, N, width]."""
        ...


class CustomAttention:
    """The tree of one forward: it passes each attention call on with its number."""

    def __init__(self, context: CallAttention, position_BN: Tensor) -> None:
        self._context, self._calls = context, count()
        self.position_BN = position_BN

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute the attention of one layer, see `LayerAttention`."""
        if torch.compiler.is_compiling():
            rule = params.rule
            return _attend(query, key, value, params.scaling, params.softcap, params.sinks, rule.window, rule.chunk)
        return self.attend_next(query, key, value, params)

    def attend_next(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute the attention of the next call."""
        return self._context.attend(next(self._calls), query, key, value, params)


_running: ContextVar[CustomAttention] = ContextVar("running")


@contextmanager
def attention_op(context: CallAttention, position_BN: Tensor) -> Iterator[CustomAttention]:
    """Yield the tree for one forward of these positions, so that compiled layers attend by `context`."""
    attention = CustomAttention(context, position_BN)
    token = _running.set(attention)
    try:
        yield attention
    finally:
        _running.reset(token)


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
    out = _running.get().attend_next(query, key, value, AttentionParams(Rule(window, chunk), scaling, softcap, sinks))
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@_attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    slots, heads, length, _width = query.shape
    return query.new_empty(slots, length, heads, value.shape[-1]).transpose(1, 2)
