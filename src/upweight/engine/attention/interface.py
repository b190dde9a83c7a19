"""Tree attention behind transformers' own attention and mask interfaces.

A layer's rule travels as its attention mask, and the tree with it, so that models that drop forward arguments get it
too, and recomputation under gradient checkpointing sees exactly what the forward saw. Outside `tree_masks()` both
functions do what the model's stock implementation does, so that `generate` and `evaluate` need no switch.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from upweight.engine.attention.flex import BLOCK, flex_tree_attention, tree_block_mask
from upweight.engine.attention.rules import Rule
from upweight.engine.attention.segments import SegmentPlan, segment_attention
from upweight.errors import UserError

NAME = "upweight_tree"

_stock_names: list[str] = []


@dataclass(frozen=True, eq=False)
class Scores:
    """How a layer attends: what it may see, the scale and soft cap of its scores, each head's logit for nothing."""

    rule: Rule
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None


class Attends(Protocol):
    """What travels through a tree forward: attends for a layer, whose module tells layers apart."""

    @property
    def position_BN(self) -> Tensor:
        """The positions of the tokens that are forwarded."""
        ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Query [B, heads, N, width], key and value with as many or fewer heads -> [B, heads, N, width]."""
        ...


@dataclass(frozen=True, eq=False)
class TreeRule:
    """What a layer gets for a mask: its rule, and what attends by it."""

    rule: Rule
    tree: Attends


_tree: ContextVar[Attends | None] = ContextVar("tree", default=None)


class Tree:
    """The trees of one row; for each rule the plan is made once and kept as long as the forward can be recomputed."""

    def __init__(self, end_BN: Tensor, position_BN: Tensor) -> None:
        assert end_BN.shape[0] == 1, "trees are packed into one row"
        self.end_N, self.position_N = end_BN[0], position_BN[0]
        self._plans: dict[Rule, SegmentPlan | BlockMask] = {}

    def plan(self, rule: Rule) -> SegmentPlan | BlockMask:
        """How to attend under `rule`: a block mask on a GPU, segments elsewhere and for short rows."""
        if rule not in self._plans:
            on_gpu = self.end_N.is_cuda and len(self.end_N) >= BLOCK
            make = tree_block_mask if on_gpu else SegmentPlan.of
            self._plans[rule] = make(self.end_N, self.position_N, rule)
        return self._plans[rule]

    def own(self, values_XN: Tensor) -> Tensor:
        """What this process forwards of a row's values: all of them."""
        return values_XN

    @property
    def position_BN(self) -> Tensor:
        """The positions of what this process forwards."""
        return self.own(self.position_N)[None]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
        """Attention of one layer over the row."""
        plan = self.plan(form.rule)
        attend: Callable[..., Tensor] = flex_tree_attention if isinstance(plan, BlockMask) else segment_attention
        return attend(query, key, value, plan, scaling=form.scaling, softcap=form.softcap, sinks=form.sinks)


@contextlib.contextmanager
def tree_masks(tree: Attends) -> Iterator[None]:
    """Inside, the mask function answers with rules and the tree; masks are made outside layers that get recomputed."""
    token = _tree.set(tree)
    try:
        yield
    finally:
        _tree.reset(token)


def register(stock: str) -> str:
    """Register tree attention over a stock implementation; returns the name to give to `set_attn_implementation`."""
    if stock in _stock_names:
        return _name(_stock_names.index(stock))
    _stock_names.append(stock)
    name = _name(len(_stock_names) - 1)
    AttentionInterface.register(name, functools.partial(_attention, stock=stock))
    AttentionMaskInterface.register(name, functools.partial(_mask, stock=stock))
    return name


def use_tree_attention(base: PreTrainedModel) -> None:
    """See to it that a model attends through these functions, whatever was set since."""
    current = base.config.get_text_config()._attn_implementation or "eager"
    if current != (name := register(stock_of(current))):
        base.set_attn_implementation(name)


def stock_of(name: str) -> str:
    """The stock implementation behind a registered name; any other name is its own."""
    return next((stock for number, stock in enumerate(_stock_names) if _name(number) == name), name)


def _name(number: int) -> str:
    # the stock name cannot be part of it: transformers reads meaning into "flash", "sdpa" and "/"
    return NAME if number == 0 else f"{NAME}_{number}"


def _mask(*args: Any, stock: str, local_size: int | None = None, config: Any = None, **kwargs: Any) -> Any:
    """A layer type's rule inside a tree forward, else what the stock mask function makes."""
    tree = _tree.get()
    if tree is None:
        given = {} if local_size is None else {"local_size": local_size}
        make = ALL_MASK_ATTENTION_FUNCTIONS[stock]
        return make(*args, config=config, **given, **kwargs)
    rule = Rule()
    if local_size is not None:
        chunked = getattr(config, "attention_chunk_size", None) == local_size
        rule = Rule(chunk=local_size) if chunked else Rule(window=local_size)
    sees = kwargs.get("mask_function")
    if sees is not None and bool(sees(0, 0, torch.tensor(0), torch.tensor(1))):
        raise UserError(
            "the model's attention is not causal: tokens see what follows them. A language model has to be a causal "
            'one; for a classifier of tokens set `layout: padded` (`layout="padded"` in scripts).'
        )
    return TreeRule(rule, tree)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    stock: str,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, [B, heads, N, width] in and [B, N, heads, width] out; stock where there is no rule."""
    if not isinstance(attention_mask, TreeRule):
        given = {} if scaling is None else {"scaling": scaling}
        return _stock_attention(stock, module)(module, query, key, value, attention_mask, **given, **kwargs)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    form = Scores(attention_mask.rule, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    tree = attention_mask.tree
    out = tree.attend(module, _at_positions(module, query, tree), key, value, form)
    return out.transpose(1, 2).contiguous(), None


def _at_positions(module: Any, query: Tensor, tree: Attends) -> Tensor:
    """Queries as they are at their positions, where a layer (of Llama 4) scales them by their places in the row."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", False):
        return query
    position_BN = tree.position_BN
    meant_BN, made_BN = (
        torch.log1p(torch.floor((at + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for at in (position_BN, torch.arange(position_BN.shape[1], device=position_BN.device)[None])
    )
    return (query * (meant_BN / made_BN)[:, None, :, None]).to(query.dtype)


def _stock_attention(stock: str, module: nn.Module) -> Callable[..., Any]:
    """The function of a stock implementation; `eager` is written anew in every modeling file."""
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    eager = next((f.eager_attention_forward for f in files if hasattr(f, "eager_attention_forward")), None)
    found = eager if stock == "eager" else ALL_ATTENTION_FUNCTIONS[stock]
    assert found is not None, f"{type(module).__name__} has no {stock} attention"
    return found
