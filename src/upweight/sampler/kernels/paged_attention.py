# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""The attention of `paged_attention` as one Triton kernel, which also stores the newest key and value.

Programs compute the query heads of one slot that share a key head: as many as its length asks for split its keys among
them, the last with the newest token, which it holds in registers; each runs block by block with an online softmax. The
last program to finish merges the partial results, always in the same order. Slots that share a prompt read its pages at
the same time, so that all but the first read them from the cache.

Queries and keys may come as their projections give them: the kernel then applies their norms and the rotation.
"""

from functools import cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.engine.attention.rules import AttentionParams
from upweight.models.kernels.launch import launch
from upweight.sampler.attention import Rotation

_LONG_KEY = 256  # bytes
_SMALLEST_SIDE = 16  # of a matrix product on tensor cores
_PROGRAMS = 256  # that fill a GPU
_KEYS, _MOST_PARTS = 512, 32  # of one program where many run, and programs for a slot


def paged_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pools: tuple[Tensor, Tensor],
    at: tuple[Tensor, Tensor],
    params: AttentionParams,
    rotation: Rotation | None = None,
) -> Tensor:
    """Attend with the newest query, key and value of each slot, all [slots, heads, 1, width], as is the output.

    `pools`: keys and values [pages, key heads, tokens of a page, width]; `at`: each slot's pages, and the position of
    its newest token; `rotation`: what is still to be done to query and key.
    """
    keys, values = pools
    table, lengths = at
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    slots, heads, _, width = query.shape
    key_heads, value_width, page = key.shape[1], value.shape[-1], keys.shape[2]
    out = torch.empty(slots, heads, 1, value_width, dtype=query.dtype, device=query.device)
    repeat, pairs = heads // key_heads, slots * key_heads
    capacity = table.shape[1] * page
    wide = _side(max(width, value_width)) * key.element_size()
    columns, warps, stages, parts, least = _blocks(pairs, wide, capacity, page)
    partials = torch.empty(pairs * parts * repeat * (_side(value_width) + 2), dtype=torch.float32, device=query.device)
    normed = rotation is not None and rotation.query_norm is not None
    cos, sin, query_norm, key_norm, epsilon = rotation or Rotation(query, query)
    launch(
        _attention_kernel, (slots, key_heads, parts),
        query, key, value, keys, values, table, lengths,
        params.sinks if params.sinks is not None else lengths,
        out, partials, _counters(query.device, triton.next_power_of_2(pairs)), params.scaling, params.softcap or 0.0,
        table.stride(0), query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), least, parts,
        cos, sin, query_norm if normed else query, key_norm if normed else query, epsilon,
        REPEAT=repeat, ROWS=_side(repeat), COLUMNS=columns, PAGE=page,
        WIDTH=width, WIDTH_UP=_side(width), VALUE_WIDTH=value_width, VALUE_WIDTH_UP=_side(value_width),
        WINDOW=params.rule.window or 0, CHUNK=params.rule.chunk or 0,
        CAPPED=params.softcap is not None, SINKS=params.sinks is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        ROTARY=rotation is not None, NORMED=normed, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _blocks(pairs: int, wide: int, capacity: int, page: int) -> tuple[int, int, int, int, int]:
    """Return the keys of a block, warps and stages, the most parts of a slot's keys, and the fewest keys of a part."""
    # Measured on an H200: few programs are fastest with large blocks, many programs with small ones.
    columns, warps, stages, parts, least = 32, 2, 3, 2 * _PROGRAMS // pairs, _KEYS
    if pairs >= 4 * _PROGRAMS:
        warps, stages = 1, 2
    if wide > _LONG_KEY:
        columns, warps, stages = 64, 4, 2
    if pairs < _PROGRAMS:
        parts, least = max(_PROGRAMS // 2 // pairs, 2), _KEYS // 2
        if wide <= _LONG_KEY // 2:
            columns, warps, stages, parts, least = 32, 1, 3, max(parts, 4), _KEYS // 4
        elif wide <= _LONG_KEY:
            columns, warps, stages = 64, 4, 3
    columns = min(columns, page)  # which it divides
    parts = max(1, min(max(parts, capacity // _KEYS), triton.cdiv(capacity, columns), _MOST_PARTS))
    return columns, warps, stages, parts, least


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
def _load_row(
    at, there, cos_at, sin_at, norm_at, epsilon,
    WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr, ROTARY: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Load the rows at some addresses, with their norm and rotation if these are not done yet."""
    column = tl.arange(0, WIDTH_UP)
    inside = there[:, None] & (column[None, :] < WIDTH)
    row = tl.load(at[:, None] + column[None, :], mask=inside, other=0.0)
    if ROTARY:
        # The other half of a row, which the rotation exchanges with this one.
        partner = tl.where(column < WIDTH // 2, column + WIDTH // 2, column - WIDTH // 2)
        other = tl.load(at[:, None] + partner[None, :], mask=inside, other=0.0)
        if NORMED:
            scale = 1.0 / tl.sqrt(tl.sum(row.to(tl.float32) * row.to(tl.float32), 1) / WIDTH + epsilon)
            weight = tl.load(norm_at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            other_weight = tl.load(norm_at + partner, mask=column < WIDTH, other=0.0).to(tl.float32)
            # rounded as a norm's output is
            other = (other.to(tl.float32) * scale[:, None] * other_weight[None, :]).to(row.dtype)
            row = (row.to(tl.float32) * scale[:, None] * weight[None, :]).to(row.dtype)
        cos = tl.load(cos_at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        sin = tl.load(sin_at + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        sin = tl.where(column < WIDTH // 2, -sin, sin)
        rotated = row.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]
        row = rotated.to(row.dtype)
    return row


@triton.jit
def _store(mine, there, row_max, total, acc, counter, count, WIDTH: tl.constexpr):
    """Store the partial softmax of a part; return whether this was the last of `count` parts."""
    tl.store(mine, row_max, mask=there)
    tl.store(mine + 1, total, mask=there)
    tl.store(mine[:, None] + 2 + tl.arange(0, WIDTH)[None, :], acc, mask=there[:, None])
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == count - 1


@triton.jit
def _merged(ends, there, row_max, total, acc, count, by_part, WIDTH: tl.constexpr):
    """Merge the partial softmaxes of `count` parts into the one that is given."""
    in_value = tl.arange(0, WIDTH)
    for backwards in range(count):  # the last part, which holds the newest token, is never empty
        part = ends + (count - 1 - backwards) * by_part
        other = tl.load(part, mask=there, other=0.0)
        larger = tl.maximum(row_max, other)
        shrink, share = tl.exp(row_max - larger), tl.exp(other - larger)
        total = total * shrink + tl.load(part + 1, mask=there, other=1.0) * share
        more = tl.load(part[:, None] + 2 + in_value[None, :], mask=there[:, None], other=0.0)
        acc = acc * shrink[:, None] + more * share[:, None]
        row_max = larger
    return row_max, total, acc


@triton.jit
def _attend_keys(
    keys, values, table, head, key_heads, first, count, at,
    query, row_max, total, acc,
    scaling, softcap,
    COLUMNS: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the keys at positions `first` to `count`."""
    in_width = tl.arange(0, WIDTH_UP)
    in_value = tl.arange(0, VALUE_WIDTH_UP)
    page = tl.load(table + first // PAGE).to(tl.int64)
    for start in range(first, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < count
        seen = there
        if WINDOW > 0:
            seen = seen & (at - column < WINDOW)
        if CHUNK > 0:
            seen = seen & (at // CHUNK == column // CHUNK)
        # A block lies within one page, whose number was loaded with the block before it.
        row = (page * key_heads + head) * PAGE + column % PAGE
        page = tl.load(table + tl.minimum(start + COLUMNS, count - 1) // PAGE).to(tl.int64)
        key = tl.load(
            keys + row[:, None] * WIDTH + in_width[None, :],
            mask=there[:, None] & (in_width[None, :] < WIDTH), other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        scores = _capped(scores, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(row_max, tl.max(scores, 1))
        share = tl.exp(scores - larger[:, None])
        shrink = tl.exp(row_max - larger)
        value = tl.load(
            values + row[:, None] * VALUE_WIDTH + in_value[None, :],
            mask=there[:, None] & (in_value[None, :] < VALUE_WIDTH), other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(share, 1)
        acc = acc * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision=PRECISION)
        row_max = larger
    return row_max, total, acc


@triton.jit
def _finish(
    row_max, total, acc, partials, counters, sinks, out, slot, head, part, count, parts,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Store the output of a slot and key head, if this is the last of its parts, which merges all of them."""
    row, in_value = tl.arange(0, ROWS), tl.arange(0, VALUE_WIDTH_UP)
    there = row < REPEAT
    index = slot * tl.num_programs(1) + head
    last = count <= 1
    by_part = REPEAT * (VALUE_WIDTH_UP + 2)
    ends = partials + (index * parts * REPEAT + row) * (VALUE_WIDTH_UP + 2)
    if count > 1:
        last = _store(ends + part * by_part, there, row_max, total, acc, counters + index, count, VALUE_WIDTH_UP)
        if last:
            row_max = tl.full((ROWS,), float("-inf"), tl.float32)
            row_max, total, acc = _merged(
                ends, there, row_max, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VALUE_WIDTH_UP), tl.float32),
                count, by_part, VALUE_WIDTH_UP,
            )  # fmt: skip
            tl.store(counters + index, 0)
    if last:
        if SINKS:  # a logit without a value
            sink = tl.load(sinks + head * REPEAT + row, mask=there, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(row_max, sink)
            total = total * tl.exp(row_max - larger) + tl.exp(sink - larger)
            acc = acc * tl.exp(row_max - larger)[:, None]
        tl.store(
            out + (index * REPEAT + row)[:, None] * VALUE_WIDTH + in_value[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=there[:, None] & (in_value[None, :] < VALUE_WIDTH),
        )  # fmt: skip


@triton.jit(do_not_specialize=["least", "parts", "table_by_slot"])
def _attention_kernel(
    query_at, key_at, value_at, keys, values, tables, lengths, sinks, out,
    partials, counters, scaling, softcap, table_by_slot,
    query_by_slot, query_by_head, key_by_slot, key_by_head, value_by_slot, value_by_head, least,
    parts, cos_at, sin_at, query_norm, key_norm, epsilon,
    REPEAT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_UP: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDTH_UP: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    ROTARY: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    key_heads = tl.num_programs(1)
    at = tl.load(lengths + slot).to(tl.int32)
    begin = at * 0
    if WINDOW > 0:
        begin = tl.maximum(at - WINDOW + 1, 0)
    if CHUNK > 0:
        begin = at // CHUNK * CHUNK
    begin = begin // COLUMNS * COLUMNS
    # Short sequences take fewer programs than there are.
    each = tl.maximum(tl.cdiv(tl.cdiv(at - begin, parts), COLUMNS) * COLUMNS, least)
    count = tl.maximum(tl.cdiv(at - begin, each), 1)
    if part >= count:
        return
    row, in_width, in_value = tl.arange(0, ROWS), tl.arange(0, WIDTH_UP), tl.arange(0, VALUE_WIDTH_UP)
    there = row < REPEAT
    cos_at, sin_at = cos_at + slot * WIDTH, sin_at + slot * WIDTH
    query = _load_row(
        query_at + slot * query_by_slot + (head * REPEAT + row) * query_by_head, there,
        cos_at, sin_at, query_norm, epsilon, WIDTH, WIDTH_UP, ROTARY, NORMED,
    )  # fmt: skip
    row_max = tl.full((ROWS,), -1e30, tl.float32)  # finite: a block of which nothing is seen leaves it, and no NaN
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_WIDTH_UP), tl.float32)
    table = tables + slot * table_by_slot
    if part == count - 1:
        one = tl.arange(0, 1)
        newest_row = (tl.load(table + at // PAGE).to(tl.int64) * key_heads + head) * PAGE + at % PAGE
        key_1W = _load_row(
            key_at + slot * key_by_slot + head * key_by_head + one, one == 0,
            cos_at, sin_at, key_norm, epsilon, WIDTH, WIDTH_UP, ROTARY, NORMED,
        )  # fmt: skip
        value_1W = _load_row(
            value_at + slot * value_by_slot + head * value_by_head + one, one == 0,
            cos_at, sin_at, key_norm, epsilon, VALUE_WIDTH, VALUE_WIDTH_UP, False, False,
        )  # fmt: skip
        tl.store(keys + newest_row * WIDTH + in_width[None, :], key_1W, mask=in_width[None, :] < WIDTH)
        tl.store(values + newest_row * VALUE_WIDTH + in_value[None, :], value_1W, mask=in_value[None, :] < VALUE_WIDTH)
        newest = tl.sum(query.to(tl.float32) * key_1W.to(tl.float32), 1) * scaling
        row_max, total, acc = _capped(newest, softcap, CAPPED), total + 1.0, acc + value_1W.to(tl.float32)
    first = begin + part * each
    row_max, total, acc = _attend_keys(
        keys, values, table, head, key_heads, first, tl.minimum(first + each, at), at, query, row_max, total, acc,
        scaling, softcap, COLUMNS, PAGE, WIDTH, WIDTH_UP, VALUE_WIDTH, VALUE_WIDTH_UP, WINDOW, CHUNK, CAPPED, PRECISION,
    )  # fmt: skip
    _finish(
        row_max, total, acc, partials, counters, sinks, out, slot, head, part, count, parts,
        REPEAT, ROWS, VALUE_WIDTH, VALUE_WIDTH_UP, SINKS,
    )  # fmt: skip
