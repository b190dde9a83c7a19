# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""The attention of `cascade.py` as one Triton kernel, which also stores the newest key and value.

A program serves the query heads of one slot that share a key head. It begins with the newest token, which it holds
in registers, and goes over the prompt's keys and the completion's block by block with a running softmax. Members of
a group read their prompt's keys at the same time, so that all but the first find them in the cache.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.engine.attention import Scores

_COLUMNS = 64
_SMALLEST_SIDE = 16  # of a matrix product on tensor cores


def cascade_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    caches: tuple[Tensor, Tensor, Tensor, Tensor],
    at: tuple[Tensor, Tensor],
    form: Scores,
) -> Tensor:
    """The newest query, key and value of each slot, [slots, heads, 1, width] -> attention, [slots, heads, 1, width].

    `caches`: keys and values of prompts and of completions; `at`: each group's prompt length, and how many tokens its
    completions have, which is where the newest key and value go.
    """
    prompt_key, prompt_value, new_key, new_value = caches
    lengths, step = at
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    slots, heads, _, width = query.shape
    key_heads, value_width = key.shape[1], value.shape[-1]
    out = torch.empty(slots, heads, 1, value_width, dtype=query.dtype, device=query.device)
    repeat = heads // key_heads
    launch: Any = _kernel
    launch[(slots, key_heads)](
        query, key, value, prompt_key, prompt_value, new_key, new_value, lengths, step,
        form.sinks if form.sinks is not None else lengths, out,
        form.scaling, form.softcap or 0.0, slots // lengths.shape[0], prompt_key.shape[2], new_key.shape[2],
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        REPEAT=repeat, ROWS=_side(repeat), COLUMNS=_COLUMNS,
        WIDTH=width, WIDTH_UP=_side(width), VALUE_WIDTH=value_width, VALUE_WIDTH_UP=_side(value_width),
        WINDOW=form.rule.window or 0, CHUNK=form.rule.chunk or 0,
        CAPPED=form.softcap is not None, SINKS=form.sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out


def _side(size: int) -> int:
    return max(_SMALLEST_SIDE, triton.next_power_of_2(size))


@triton.jit
def _capped(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        # tanh by the exponential of a negative number, which cannot overflow
        small = tl.exp(-2 * tl.abs(scores) / softcap)
        size = softcap * (1 - small) / (1 + small)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def _moved(source, target, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr):
    """Copy a row, and return it."""
    column = tl.arange(0, WIDTH_UP)
    row = tl.load(source + column, mask=column < WIDTH, other=0.0)
    tl.store(target + column, row, mask=column < WIDTH)
    return row


@triton.jit
def _with_sinks(largest, total, mean, sinks):
    """The running softmax with one more logit for each row, which stands for seeing nothing."""
    larger = tl.maximum(largest, sinks)
    return total * tl.exp(largest - larger) + tl.exp(sinks - larger), mean * tl.exp(largest - larger)[:, None]


@triton.jit
def _over(
    keys, values, first, count, at, offset,
    query, largest, total, mean,
    scaling, softcap,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax carried over keys `first` to `count`, whose positions begin at `offset`."""
    in_width = tl.arange(0, WIDTH_UP)
    in_value = tl.arange(0, VALUE_WIDTH_UP)
    for start in range(first, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < count
        seen = there
        if WINDOW > 0:
            seen = seen & (at - (offset + column) < WINDOW)
        if CHUNK > 0:
            seen = seen & (at // CHUNK == (offset + column) // CHUNK)
        key = tl.load(
            keys + column[:, None] * WIDTH + in_width[None, :],
            mask=there[:, None] & (in_width[None, :] < WIDTH), other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        scores = _capped(scores, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        share = tl.exp(scores - larger[:, None])
        shrink = tl.exp(largest - larger)
        value = tl.load(
            values + column[:, None] * VALUE_WIDTH + in_value[None, :],
            mask=there[:, None] & (in_value[None, :] < VALUE_WIDTH), other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(share, 1)
        mean = mean * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        largest = larger
    return largest, total, mean


@triton.jit
def _kernel(
    query_at, key_at, value_at, prompt_keys, prompt_values, new_keys, new_values, lengths, steps, sinks, out,
    scaling, softcap, members, prompt_room, new_room,
    query_by_slot, query_by_head, key_by_slot, key_by_head, value_by_slot, value_by_head,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    key_heads = tl.num_programs(1)
    group = slot // members
    length = tl.load(lengths + group).to(tl.int32)
    step = tl.load(steps).to(tl.int32)
    at = length + step
    in_width, in_value = tl.arange(0, WIDTH_UP), tl.arange(0, VALUE_WIDTH_UP)
    row = tl.arange(0, ROWS)

    new_keys += (slot * key_heads + head) * new_room * WIDTH
    new_values += (slot * key_heads + head) * new_room * VALUE_WIDTH
    key = _moved(key_at + slot * key_by_slot + head * key_by_head, new_keys + step * WIDTH, WIDTH, WIDTH_UP)
    value = _moved(
        value_at + slot * value_by_slot + head * value_by_head, new_values + step * VALUE_WIDTH,
        VALUE_WIDTH, VALUE_WIDTH_UP,
    )  # fmt: skip
    query = tl.load(
        query_at + slot * query_by_slot + (head * REPEAT + row)[:, None] * query_by_head + in_width[None, :],
        mask=(row[:, None] < REPEAT) & (in_width[None, :] < WIDTH), other=0.0,
    )  # fmt: skip
    own = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scaling
    largest = _capped(own, softcap, CAPPED)
    total = tl.full((ROWS,), 1.0, tl.float32)
    mean = tl.zeros((ROWS, VALUE_WIDTH_UP), tl.float32) + value.to(tl.float32)[None, :]

    reach = at * 0
    if WINDOW > 0:
        reach = tl.maximum(at - WINDOW + 1, 0)
    if CHUNK > 0:
        reach = at // CHUNK * CHUNK
    prompt_keys += (group * key_heads + head) * prompt_room * WIDTH
    prompt_values += (group * key_heads + head) * prompt_room * VALUE_WIDTH
    first = tl.minimum(reach, length) // COLUMNS * COLUMNS
    largest, total, mean = _over(
        prompt_keys, prompt_values, first, length, at, 0, query, largest, total, mean, scaling, softcap,
        COLUMNS, WIDTH, WIDTH_UP, VALUE_WIDTH, VALUE_WIDTH_UP, WINDOW, CHUNK, CAPPED, PRECISION,
    )  # fmt: skip
    first = tl.maximum(reach - length, 0) // COLUMNS * COLUMNS
    largest, total, mean = _over(
        new_keys, new_values, first, step, at, length, query, largest, total, mean, scaling, softcap,
        COLUMNS, WIDTH, WIDTH_UP, VALUE_WIDTH, VALUE_WIDTH_UP, WINDOW, CHUNK, CAPPED, PRECISION,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head * REPEAT + row, mask=row < REPEAT, other=0.0).to(tl.float32)
        total, mean = _with_sinks(largest, total, mean, sink)
    mean = mean / total[:, None]
    tl.store(
        out + ((slot * key_heads + head) * REPEAT + row)[:, None] * VALUE_WIDTH + in_value[None, :],
        mean.to(value.dtype), mask=(row[:, None] < REPEAT) & (in_value[None, :] < VALUE_WIDTH),
    )  # fmt: skip
