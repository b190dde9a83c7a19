"""Scores at chosen positions through a classifier's own forward, so that all that lies before its score takes part.

The class's forward runs once, on texts of one token each: its body answers with the hidden state of a scored position
for each of them. Dropout, further layers and pooling are then the model's own, whatever they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from upweight.engine.logits import BodyOutput
from upweight.errors import UserError

_NO_TOKEN = -1

Read = Callable[[Callable[..., Any]], Tensor]  # the body's stock forward -> hidden states, a text's tokens on axis 1
_read: ContextVar[Read | None] = ContextVar("read", default=None)


def install_scores(base: PreTrainedModel, body: nn.Module) -> None:
    """Teach a classifier's body to answer for scored positions alone; raise where the class scores something else."""
    if not _scores_last_token(base, body):
        raise UserError(
            f"{type(base).__name__} scores neither a text by its last token nor each token by itself: it cannot be "
            "trained as a reward model here. Name a decoder model, such as a Llama or Qwen."
        )
    if "_stock_forward" not in body.__dict__:
        body.__dict__["_stock_forward"] = body.forward
        body.forward = MethodType(_body_forward, body)


def scores_at(base: PreTrainedModel, count: int, read: Read) -> Tensor:
    """Scores in float32 [count, C] at the hidden states [count, D] that `read` picks from the body's output."""
    device = next(base.parameters()).device
    ids_T1 = torch.zeros((count, 1), dtype=torch.int64, device=device)
    token = _read.set(lambda stock: read(stock)[:, None])
    try:
        with without_padding(base.config):
            logits = base.__dict__["_stock_forward"](input_ids=ids_T1, use_cache=False).logits
    finally:
        _read.reset(token)
    return logits.reshape(count, -1).float()


@contextlib.contextmanager
def without_padding(config: PreTrainedConfig) -> Iterator[None]:
    """Inside, no token of a text passes for padding, so that classifiers score the last one, whatever it is."""
    places = list({id(place): place for place in (config, config.get_text_config())}.values())
    before = [place.pad_token_id for place in places]
    try:
        for place in places:
            place.pad_token_id = _NO_TOKEN  # not None, with which they refuse more than one text
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.pad_token_id = value


def _body_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The body's stock forward; while scores are read, hidden states of scored positions instead."""
    read, stock = _read.get(), self.__dict__["_stock_forward"]
    if read is None:
        return stock(*args, **kwargs)
    token = _read.set(None)  # the body itself is no part of this
    try:
        return BodyOutput(read(stock))
    finally:
        _read.reset(token)


def _scores_last_token(base: PreTrainedModel, body: nn.Module) -> bool:
    """Whether the last token, and no other, decides the score of a text, or each token its own.

    No weight is read, as in `logit_form`: modules with weights after the body are stood in for by a choice of columns.
    """
    if not hasattr(base.config.get_text_config(), "hidden_size"):  # several bodies, each with a size of its own
        return False
    inside = set(body.modules())
    outside = [module for module in base.modules() if module is not base and module not in inside]
    after = [module for module in outside if next(module.parameters(recurse=False), None) is not None]
    before = [(module, module.__dict__.get("forward")) for module in (body, *after)]
    hidden_1ND = torch.zeros(1, 3, base.config.get_text_config().hidden_size)
    found: list[Tensor] = []
    try:
        for module in after:
            module.forward = MethodType(_columns, module)
        for tokens in ([], [2], [0, 1]):
            marked_1ND = hidden_1ND.index_fill(1, torch.tensor(tokens, dtype=torch.int64), 1.0)
            body.forward = MethodType(lambda self, *a, marked=marked_1ND, **k: BodyOutput(marked), body)
            with without_padding(base.config):
                found.append(base.forward(input_ids=torch.zeros((1, 3), dtype=torch.int64), use_cache=False).logits)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):  # it asks its body for something else
        return False
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward
    nothing, last, first = found
    if nothing.ndim == 3:
        return nothing.shape[1] == 3
    return nothing.ndim == 2 and not torch.equal(nothing, last) and torch.equal(nothing, first)


def _columns(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As many columns of the input as the module has outputs; tokens stay apart."""
    width = getattr(self, "out_features", x.shape[-1])
    return x[..., torch.arange(width) % x.shape[-1]]
