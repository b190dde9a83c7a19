"""Tree attention behind transformers' attention and mask interfaces.

A layer's rule and tree are passed as its attention mask, so that models that drop forward arguments get them too, and
recomputation under gradient checkpointing sees exactly what the forward saw. Outside `tree_masks()` both functions call
the model's stock implementation, so that `generate` and `evaluate` need no switch.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from upweight.engine.attention.flex import BLOCK_TOKENS, flex_tree_attention, tree_block_mask
from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.engine.attention.segments import SegmentPlan, segment_attention
from upweight.errors import UserError
from upweight.models.modules import context_value

NAME = "upweight_tree"
_stock_names: dict[str, str] = {}  # by the name under which tree attention over them is registered


class LayerAttention(Protocol):
    """Computes the attention of every layer in a tree forward; `module` identifies the layer."""

    @property
    def position_BN(self) -> Tensor:
        """The positions of the tokens that are forwarded."""
        ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Query [B, heads, N, width], key and value with as many or fewer heads -> [B, heads, N, width]."""
        ...


@dataclass(frozen=True, eq=False)
class TreeRule:
    """The attention mask of a layer in a tree forward: its rule, and the tree that attends by it."""

    rule: Rule
    tree: LayerAttention


_tree: ContextVar[LayerAttention | None] = ContextVar("tree", default=None)


class Tree:
    """The trees of one row; the plan of each rule is built once and kept as long as the forward can be recomputed."""

    def __init__(self, end_BN: Tensor, position_BN: Tensor) -> None:
        assert end_BN.shape[0] == 1, "trees are packed into one row"
        self.end_N, self.position_N = end_BN[0], position_BN[0]
        self._plans: dict[Rule, SegmentPlan | BlockMask] = {}

    def plan(self, rule: Rule) -> SegmentPlan | BlockMask:
        """Return how to attend under `rule`: a block mask on a GPU, segments elsewhere and for short rows."""
        if rule not in self._plans:
            on_gpu = self.end_N.is_cuda and len(self.end_N) >= BLOCK_TOKENS
            build = tree_block_mask if on_gpu else SegmentPlan.of
            self._plans[rule] = build(self.end_N, self.position_N, rule)
        return self._plans[rule]

    def local(self, values_XN: Tensor) -> Tensor:
        """Return the part of a row's values that this rank forwards: all of them."""
        return values_XN

    @property
    def position_BN(self) -> Tensor:
        """The positions of the tokens that this rank forwards."""
        return self.local(self.position_N)[None]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Compute the attention of one layer over the row."""
        plan = self.plan(params.rule)
        attend: Callable[..., Tensor] = flex_tree_attention if isinstance(plan, BlockMask) else segment_attention
        return attend(query, key, value, plan, params)


def tree_masks(tree: LayerAttention) -> AbstractContextManager[None]:
    """Let the mask function return rules with `tree` inside; masks are built outside the layers that get recomputed."""
    return context_value(_tree, tree)


def current_tree() -> LayerAttention | None:
    """Return what attends in the forward that runs now, if it is a tree forward."""
    return _tree.get()


@functools.cache
def register(stock: str) -> str:
    """Register tree attention over a stock implementation and return its name for `set_attn_implementation`."""
    # the stock name cannot be part of it: transformers reads meaning into "flash", "sdpa" and "/"
    name = f"{NAME}_{len(_stock_names)}" if _stock_names else NAME
    _stock_names[name] = stock
    AttentionInterface.register(name, functools.partial(_tree_attention, stock=stock))
    AttentionMaskInterface.register(name, functools.partial(_tree_mask, stock=stock))
    return name


def use_tree_attention(base: PreTrainedModel) -> None:
    """Make a model attend through these functions, whatever implementation was set since."""
    current = base.config.get_text_config()._attn_implementation or "eager"
    if current != (name := register(stock_of(current))):
        base.set_attn_implementation(name)


def stock_of(name: str) -> str:
    """Return the stock implementation behind a registered name; any other name is returned as it is."""
    return _stock_names.get(name, name)


def _tree_mask(*args: Any, stock: str, local_size: int | None = None, config: Any = None, **kwargs: Any) -> Any:
    """Return a layer type's rule inside a tree forward, else the mask of the stock function."""
    tree = _tree.get()
    if tree is None:
        kwargs |= {} if local_size is None else {"local_size": local_size}
        return ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, config=config, **kwargs)
    chunked = getattr(config, "attention_chunk_size", None) == local_size
    rule = Rule(chunk=local_size) if chunked else Rule(window=local_size)  # neither without a size
    sees = kwargs.get("mask_function")
    if sees is not None and bool(sees(0, 0, torch.tensor(0), torch.tensor(1))):
        raise UserError(
            "the model's attention is not causal: tokens see what follows them. A language model has to be a causal "
            "one; for a classifier of tokens set `layout: padded`."
        )
    return TreeRule(rule, tree)


def _tree_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, stock: str, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend in one layer, [B, heads, N, width] in and [B, N, heads, width] out; stock where the mask is no rule."""
    scaling: float | None = kwargs.pop("scaling", None)
    if not isinstance(attention_mask, TreeRule):
        scale_argument = {} if scaling is None else {"scaling": scaling}
        return _stock_attention(stock, module)(module, query, key, value, attention_mask, **scale_argument, **kwargs)
    rule, tree = attention_mask.rule, attention_mask.tree
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    params = AttentionParams(rule, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    out = tree.attend(module, _at_positions(module, query, tree), key, value, params)
    return out.transpose(1, 2).contiguous(), None


def _at_positions(module: Any, query: Tensor, tree: LayerAttention) -> Tensor:
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
    """Return the function of a stock implementation; every modeling file defines an `eager` one."""
    if stock != "eager":
        return ALL_ATTENTION_FUNCTIONS[stock]
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    return next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
