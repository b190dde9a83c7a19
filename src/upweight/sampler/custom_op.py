"""The sampler's attention as one operation: a compiled layer is then one piece, not the pieces around a call.

All layers of a model share what was compiled for one of them, so an operation cannot be told which layer calls it:
layers are told apart by the order in which they attend, which is the same in every forward.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from upweight.engine.attention.interface import Attends, Scores
from upweight.engine.attention.rules import Rule


class CustomAttention:
    """Travels as `tree=` and hands each layer's call on to `attends`; `layers` in the order of their calls."""

    def __init__(self, attends: Attends, layers: Iterable[nn.Module]) -> None:
        self._attends, self._layers = attends, iter(layers)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Attention of one layer, see `Attends`."""
        if torch.compiler.is_compiling():
            rule = form.rule
            return _attend(query, key, value, form.scaling, form.softcap, form.sinks, rule.window, rule.chunk)
        next(self._layers, None)
        return self._attends.attend(module, query, key, value, form)

    def attend_next(self, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Attention of the layer whose turn it is."""
        return self._attends.attend(next(self._layers), query, key, value, form)


_running: ContextVar[CustomAttention] = ContextVar("running")


@contextmanager
def attention_op(attends: Attends, layers: Iterable[nn.Module]) -> Iterator[CustomAttention]:
    """What a forward inside is given as `tree=` so that compiled layers attend by `attends`."""
    given = CustomAttention(attends, layers)
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
