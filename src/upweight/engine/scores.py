"""Scores at chosen positions through a classifier's own forward, including all layers between its body and its score.

The class's forward runs once, on texts of one token each; its body returns the hidden state of one scored position for
each text. Dropout, further layers and pooling are then those of the model, whatever they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from upweight.engine.logits import HiddenStatesOutput
from upweight.errors import UserError
from upweight.models.modules import context_value, replaced_forwards, wrap_forward

_NO_TOKEN = -1

ReadHidden = Callable[[Callable[..., Any]], Tensor]  # the body's stock forward -> hidden states at scored positions
_read: ContextVar[ReadHidden | None] = ContextVar("read", default=None)


def install_scores(base: PreTrainedModel, body: nn.Module) -> None:
    """Let a classifier's body return scored positions only; raise where the class scores something else."""
    if not _scores_last_token(base, body):
        raise UserError(
            f"{type(base).__name__} scores neither a text by its last token nor each token by itself: it cannot be "
            "trained as a reward model here. Name a decoder model, such as a Llama or Qwen."
        )
    wrap_forward(body, _body_forward)


def scores_at(base: PreTrainedModel, count: int, read: ReadHidden) -> Tensor:
    """Return scores in float32 [count, C] at the hidden states [count, D] that `read` takes from the body's output."""
    ids_T1 = torch.zeros((count, 1), dtype=torch.int64, device=next(base.parameters()).device)
    with context_value(_read, read), without_padding(base.config):
        logits = base.__dict__["_stock_forward"](input_ids=ids_T1, use_cache=False).logits
    return logits.reshape(count, -1).float()


@contextlib.contextmanager
def without_padding(config: PreTrainedConfig) -> Iterator[None]:
    """Treat no token as padding inside, so that classifiers score the last token, whatever it is."""
    # That of a vision-language model may have none beside the one of its language model.
    configs = [part for part in (config, config.get_text_config()) if hasattr(part, "pad_token_id")]
    before = [part.pad_token_id for part in configs]
    try:
        for part in configs:
            part.pad_token_id = _NO_TOKEN  # not None, with which they refuse more than one text
        yield
    finally:
        for part, value in zip(configs, before, strict=True):
            part.pad_token_id = value


def _body_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the body's stock forward; inside `scores_at`, return the hidden states of scored positions instead."""
    read, stock = _read.get(), self.__dict__["_stock_forward"]
    if read is None:
        return stock(*args, **kwargs)
    with context_value(_read, None):  # the body may call its forward again
        return HiddenStatesOutput(read(stock)[:, None])


def _scores_last_token(base: PreTrainedModel, body: nn.Module) -> bool:
    """Return whether only the last token determines the score of a text, or each token has a score."""
    # As in `logit_transform` no weight is read: modules with weights after the body are replaced by `_first_columns`.
    if not hasattr(base.config.get_text_config(), "hidden_size"):  # several bodies, each with a size of its own
        return False
    inside = set(body.modules())
    outside = [module for module in base.modules() if module is not base and module not in inside]
    after = [module for module in outside if next(module.parameters(recurse=False), None) is not None]
    hidden_1ND = torch.zeros(1, 3, base.config.get_text_config().hidden_size)
    outputs: list[Tensor] = []
    try:
        for tokens in ([], [2], [0, 1]):
            marked_1ND = hidden_1ND.index_fill(1, torch.tensor(tokens, dtype=torch.int64), 1.0)
            forwards = {**dict.fromkeys(after, _first_columns), body: HiddenStatesOutput(marked_1ND)}
            with replaced_forwards(forwards), without_padding(base.config):
                outputs.append(base.forward(input_ids=torch.zeros((1, 3), dtype=torch.int64), use_cache=False).logits)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):  # it reads another output of its body
        return False
    unmarked, last, first = outputs
    if unmarked.ndim == 3:
        return unmarked.shape[1] == 3
    return unmarked.ndim == 2 and not torch.equal(unmarked, last) and torch.equal(unmarked, first)


def _first_columns(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return as many columns of the input as the module has outputs, without mixing tokens."""
    width = getattr(self, "out_features", x.shape[-1])
    return x[..., torch.arange(width) % x.shape[-1]]
