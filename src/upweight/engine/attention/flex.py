"""Tree attention on a GPU: FlexAttention with a block mask from the block-wise extremes of `end` and positions."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.errors import UserError

BLOCK_TOKENS = 128
_LEAST_WIDTH = 16  # of heads, that FlexAttention takes
_COMPILE_LIMIT = 64  # layer rules times modes times the options below, each compiled once


def block_tables(end_N: Tensor, position_N: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return two [blocks, blocks] tables of booleans by query block and key block: partly visible, fully visible."""
    length = len(end_N)
    blocks = -(-length // BLOCK_TOKENS)
    if length % BLOCK_TOKENS:  # the tail sees itself only
        tail = torch.arange(length, blocks * BLOCK_TOKENS, device=end_N.device, dtype=end_N.dtype)
        end_N, position_N = torch.cat([end_N, tail + 1]), torch.cat([position_N, torch.zeros_like(tail)])
    low_end, high_end = end_N.view(blocks, BLOCK_TOKENS).aminmax(dim=1)
    start = torch.arange(blocks, device=end_N.device) * BLOCK_TOKENS
    below = start[None, :] < start[:, None]
    some = below & (high_end[None, :] > start[:, None])
    every = below & (low_end[None, :] >= start[:, None] + BLOCK_TOKENS)
    first, last = position_N.view(blocks, BLOCK_TOKENS).aminmax(dim=1)
    if rule.window is not None:
        some &= first[:, None] - last[None, :] < rule.window
        every &= last[:, None] - first[None, :] < rule.window
    if rule.chunk is not None:
        first, last = first // rule.chunk, last // rule.chunk
        some &= (first[:, None] <= last[None, :]) & (first[None, :] <= last[:, None])
        every &= (first[:, None] == last[None, :]) & (last[:, None] == first[None, :])
    # No block is in both tables; partly visible ones are masked token by token.
    return (some & ~every) | torch.eye(blocks, dtype=torch.bool, device=end_N.device), every


def tree_block_mask(end_N: Tensor, position_N: Tensor, rule: Rule) -> BlockMask:
    """Return the block mask of a row of trees, without work quadratic in the row's length."""
    # narrow integers: the kernel gathers them for every masked pair
    end_N, position_N = end_N.to(torch.int32), position_N.to(torch.int32)
    partial, full = block_tables(end_N, position_N, rule)
    return BlockMask.from_kv_blocks(
        *_counts_and_columns(partial),
        *_counts_and_columns(full),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=_mask_mod(end_N, position_N, rule),
        seq_lengths=(len(end_N), len(end_N)),
    )


def _counts_and_columns(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return a table of booleans as counts and column numbers, the format of FlexAttention."""
    counts = table.sum(1, dtype=torch.int32)
    columns = table.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], columns[None, None].contiguous()


def _mask_mod(end_N: Tensor, position_N: Tensor, rule: Rule) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the token-by-token mask function of a rule."""
    # Sizes as tensors: a number that differs between two rules would make the compiler take it for a variable shape.
    window, chunk = (None if size is None else end_N.new_full((), size) for size in (rule.window, rule.chunk))

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end_N[k])

    def sees_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert window is not None
        return (k <= q) & (q < end_N[k]) & (position_N[q] - position_N[k] < window)

    def sees_chunk(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert chunk is not None
        return (k <= q) & (q < end_N[k]) & (position_N[q] // chunk == position_N[k] // chunk)

    if window is not None:
        return sees_window
    return sees if chunk is None else sees_chunk


def flex_tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, params: AttentionParams) -> Tensor:
    """Attend over a row of trees on a GPU; query [1, heads, N, width], key and value with as many or fewer heads."""
    if query.shape[-1] < _LEAST_WIDTH:
        width = f"its attention heads have width {query.shape[-1]}, and prefix trees on a GPU need {_LEAST_WIDTH}"
        raise UserError(f"base_model: {width}. Set `layout: padded`.")
    shared_heads = query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"block_mask": mask, "scale": params.scaling, "enable_gqa": shared_heads}
    if query.shape[2] % BLOCK_TOKENS == 0:  # the compiler cannot know it of a length that varies, and checks bounds
        options["kernel_options"] = {"IS_DIVISIBLE": True}
    if params.softcap is not None:
        options["score_mod"] = _softcap_score(params.softcap)
    if params.sinks is None:
        return compiled_flex_attention()(query, key, value, **options)
    out, aux = compiled_flex_attention()(query, key, value, return_aux=AuxRequest(lse=True), **options)
    # a sink is one more key without a value: it takes its share of the softmax and adds nothing
    share = torch.sigmoid(aux.lse - params.sinks.float().view(1, -1, 1))
    return (out * share[..., None]).to(value.dtype)


@functools.cache
def _softcap_score(softcap: float) -> Callable[..., Tensor]:
    """Return the score function of a soft cap; cached, because a new function would be compiled again."""

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return cap


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled for the first row length, and from the second one on for all lengths."""
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _COMPILE_LIMIT)
    limits.specialize_float = True  # a scale or cap that differs between two models cannot be a variable of the kernel
    # With `fullgraph`, exceeding the recompile limit is an error and not a silent fall back to eager.
    return torch.compile(flex_attention, fullgraph=True)
