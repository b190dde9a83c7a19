# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""The attention of `attention.py` as one Triton kernel, which also stores the newest key and value.

A few programs compute the query heads of one slot that share a key head: some split the prompt's keys among them, some
the completion's, the last of them with the newest token, which it holds in registers; each runs block by block with an
online softmax. The last program to finish merges the partial results, always in the same order. Members of a group read
their prompt's keys at the same time, so that all but the first read them from the cache.
"""

from functools import cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.engine.attention.rules import AttentionParams

_LONG_KEY = 256  # bytes
_SMALLEST_SIDE = 16  # of a matrix product on tensor cores
_PROGRAMS = 256  # that fill a GPU
_KEYS, _MOST_PARTS = 512, 8  # for one program, and programs for a prompt or a completion


def cascade_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    caches: tuple[Tensor, Tensor, Tensor, Tensor],
    at: tuple[Tensor, Tensor],
    params: AttentionParams,
) -> Tensor:
    """Attend with the newest query, key and value of each slot, all [slots, heads, 1, width], as is the output.

    `caches`: keys and values of prompts and of completions; `at`: each group's prompt length, and the number of tokens
    in its completions, which is the column of the newest key and value.
    """
    prompt_key, prompt_value, new_key, new_value = caches
    lengths, step = at
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    slots, heads, _, width = query.shape
    key_heads, value_width = key.shape[1], value.shape[-1]
    out = torch.empty(slots, heads, 1, value_width, dtype=query.dtype, device=query.device)
    repeat, pairs = heads // key_heads, slots * key_heads
    long = _side(max(width, value_width)) * key.element_size() > _LONG_KEY
    # Measured on an H200: few programs are fastest with large blocks, many programs with small ones.
    columns, warps, stages = (64, 4, 2) if long else (32, 2, 3) if pairs >= _PROGRAMS else (128, 4, 2)
    prompt_parts, new_parts = (_number_of_parts(pairs, keys.shape[2], columns) for keys in (prompt_key, new_key))
    partials = torch.empty(
        pairs * (prompt_parts + new_parts), _side(repeat), _side(value_width) + 2,
        dtype=torch.float32, device=query.device,
    )  # fmt: skip
    launch: Any = _kernel
    launch[(slots, key_heads, prompt_parts + new_parts)](
        query, key, value, prompt_key, prompt_value, new_key, new_value, lengths, step,
        params.sinks if params.sinks is not None else lengths,
        out, partials, _counters(query.device, triton.next_power_of_2(pairs)), params.scaling, params.softcap or 0.0,
        slots // lengths.shape[0], prompt_key.shape[2], new_key.shape[2],
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        REPEAT=repeat, ROWS=_side(repeat), COLUMNS=columns,
        WIDTH=width, WIDTH_UP=_side(width), VALUE_WIDTH=value_width, VALUE_WIDTH_UP=_side(value_width),
        WINDOW=params.rule.window or 0, CHUNK=params.rule.chunk or 0,
        CAPPED=params.softcap is not None, SINKS=params.sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        PROMPT_PARTS=prompt_parts, NEW_PARTS=new_parts, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _number_of_parts(pairs: int, capacity: int, columns: int) -> int:
    """Return how many programs split the keys of each slot and key head: to fill a GPU, with a block each."""
    wanted = max(_PROGRAMS // (2 * pairs), capacity // _KEYS)
    return max(1, min(wanted, triton.cdiv(capacity, columns), _MOST_PARTS))


@cache
def _counters(device: torch.device, pairs: int) -> Tensor:
    """Return the counters of finished programs for each slot and key head; zero between launches."""
    return torch.zeros(pairs, dtype=torch.int32, device=device)


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
def _copy_row(source, target, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr):
    """Copy a row, and return it."""
    column = tl.arange(0, WIDTH_UP)
    row = tl.load(source + column, mask=column < WIDTH, other=0.0)
    tl.store(target + column, row, mask=column < WIDTH)
    return row


@triton.jit
def _store(mine, row_max, total, acc, counter, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the partial softmax of a part; return whether this was the last part."""
    tl.store(mine, row_max)
    tl.store(mine + 1, total)
    tl.store(mine[:, None] + 2 + tl.arange(0, WIDTH)[None, :], acc)
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1


@triton.jit
def _merged(
    ends, sinks, heads, there, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr
):
    """Merge the partial softmaxes into the total and the weighted values; a sink is a logit without a value."""
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        row_max = tl.load(sinks + heads, mask=there, other=0.0).to(tl.float32)
    total = tl.where(row_max > float("-inf"), 1.0, 0.0)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    in_value = tl.arange(0, WIDTH)
    for backwards in range(PARTS):  # the last part, which holds the newest token, is never empty
        part = ends + (PARTS - 1 - backwards) * ROWS * (WIDTH + 2)
        other = tl.load(part)
        larger = tl.maximum(row_max, other)
        shrink, share = tl.exp(row_max - larger), tl.exp(other - larger)
        total = total * shrink + tl.load(part + 1) * share
        acc = acc * shrink[:, None] + tl.load(part[:, None] + 2 + in_value[None, :]) * share[:, None]
        row_max = larger
    return total, acc


@triton.jit
def _attend_keys(
    keys, values, first, count, at, offset,
    query, row_max, total, acc,
    scaling, softcap,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over keys `first` to `count`, whose positions begin at `offset`."""
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
        larger = tl.maximum(row_max, tl.max(scores, 1))
        share = tl.exp(scores - larger[:, None])
        shrink = tl.exp(row_max - larger)
        value = tl.load(
            values + column[:, None] * VALUE_WIDTH + in_value[None, :],
            mask=there[:, None] & (in_value[None, :] < VALUE_WIDTH), other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(share, 1)
        acc = acc * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        row_max = larger
    return row_max, total, acc


@triton.jit
def _kernel(
    query_at, key_at, value_at, prompt_keys, prompt_values, new_keys, new_values, lengths, steps, sinks, out,
    partials, counters, scaling, softcap, members, prompt_room, new_room,
    query_by_slot, query_by_head, key_by_slot, key_by_head, value_by_slot, value_by_head,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    PROMPT_PARTS: tl.constexpr, NEW_PARTS: tl.constexpr,
):  # fmt: skip
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    PARTS: tl.constexpr = PROMPT_PARTS + NEW_PARTS
    key_heads = tl.num_programs(1)
    group = slot // members
    length, step = tl.load(lengths + group).to(tl.int32), tl.load(steps).to(tl.int32)
    at = length + step
    row, in_width, in_value = tl.arange(0, ROWS), tl.arange(0, WIDTH_UP), tl.arange(0, VALUE_WIDTH_UP)
    query = tl.load(
        query_at + slot * query_by_slot + (head * REPEAT + row)[:, None] * query_by_head + in_width[None, :],
        mask=(row[:, None] < REPEAT) & (in_width[None, :] < WIDTH), other=0.0,
    )  # fmt: skip
    reach = at * 0
    if WINDOW > 0:
        reach = tl.maximum(at - WINDOW + 1, 0)
    if CHUNK > 0:
        reach = at // CHUNK * CHUNK
    row_max = tl.full((ROWS,), -1e30, tl.float32)  # finite: a block of which nothing is seen leaves it, and no NaN
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_WIDTH_UP), tl.float32)
    index = (group * key_heads + head) * prompt_room
    keys, values = prompt_keys + index * WIDTH, prompt_values + index * VALUE_WIDTH
    begin, stop, offset, share, parts = tl.minimum(reach, length), length, 0, part, PROMPT_PARTS
    if part >= PROMPT_PARTS:
        index = (slot * key_heads + head) * new_room
        keys, values = new_keys + index * WIDTH, new_values + index * VALUE_WIDTH
        begin, stop, offset, share, parts = tl.maximum(reach - length, 0), step, length, part - PROMPT_PARTS, NEW_PARTS
    if part == PARTS - 1:
        key_at += slot * key_by_slot + head * key_by_head
        value_at += slot * value_by_slot + head * value_by_head
        key = _copy_row(key_at, keys + step * WIDTH, WIDTH, WIDTH_UP)
        value = _copy_row(value_at, values + step * VALUE_WIDTH, VALUE_WIDTH, VALUE_WIDTH_UP)
        newest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scaling
        row_max, total, acc = _capped(newest, softcap, CAPPED), total + 1.0, acc + value.to(tl.float32)[None, :]
    begin = begin // COLUMNS * COLUMNS
    each = tl.cdiv(tl.cdiv(stop - begin, parts), COLUMNS) * COLUMNS
    first = begin + share * each
    row_max, total, acc = _attend_keys(
        keys, values, first, tl.minimum(first + each, stop), at, offset, query, row_max, total, acc, scaling, softcap,
        COLUMNS, WIDTH, WIDTH_UP, VALUE_WIDTH, VALUE_WIDTH_UP, WINDOW, CHUNK, CAPPED, PRECISION,
    )  # fmt: skip
    index = slot * key_heads + head
    ends = partials + (index * PARTS * ROWS + row) * (VALUE_WIDTH_UP + 2)
    if _store(ends + part * ROWS * (VALUE_WIDTH_UP + 2), row_max, total, acc, counters + index, PARTS, VALUE_WIDTH_UP):
        total, acc = _merged(ends, sinks, head * REPEAT + row, row < REPEAT, PARTS, ROWS, VALUE_WIDTH_UP, SINKS)
        tl.store(
            out + (index * REPEAT + row)[:, None] * VALUE_WIDTH + in_value[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=(row[:, None] < REPEAT) & (in_value[None, :] < VALUE_WIDTH),
        )  # fmt: skip
        tl.store(counters + index, 0)
