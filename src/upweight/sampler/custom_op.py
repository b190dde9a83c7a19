"""The sampler's attention as one operation: a compiled layer is then one piece, not the pieces around a call.

All layers of a model share what was compiled for one of them, so an operation cannot be told which layer calls it:
calls are told apart by their order, which is the same in every forward. A module that attends more than once in a
forward has as many calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Protocol

import torch
from torch import Tensor, nn

from upweight.engine.attention.interface import Scores
from upweight.engine.attention.rules import Rule


class Context(Protocol):
    """What attends in a forward of the sampler: `engine.attention.Attends`, with the number of the call."""

    def attend(self, call: int, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Query [B, heads, N, width], key and value with as many or fewer heads -> [B, heads, N, width]."""
        ...


class CustomAttention:
    """The tree of one forward: hands each attention call on with its number."""

    def __init__(self, context: Context, position_BN: Tensor) -> None:
        self._context, self._calls = context, count()
        self.position_BN = position_BN

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Attention of one layer, see `Attends`."""
        if torch.compiler.is_compiling():
            rule = form.rule
            return _attend(query, key, value, form.scaling, form.softcap, form.sinks, rule.window, rule.chunk)
        return self.attend_next(query, key, value, form)

    def attend_next(self, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Attention of the call whose turn it is."""
        return self._context.attend(next(self._calls), query, key, value, form)


_running: ContextVar[CustomAttention] = ContextVar("running")


@contextmanager
def attention_op(context: Context, position_BN: Tensor) -> Iterator[CustomAttention]:
    """The tree for one forward of these positions, so that compiled layers attend by `context`."""
    given = CustomAttention(context, position_BN)
    token = _running.set(given)
    try:
        yield given
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
    out = _running.get().attend_next(query, key, value, Scores(Rule(window, chunk), scaling, softcap, sinks))
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@_attend.register_fake
def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    slots, heads, length, _width = query.shape
    return query.new_empty(slots, length, heads, value.shape[-1]).transpose(1, 2)
