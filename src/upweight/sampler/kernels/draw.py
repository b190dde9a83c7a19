# ruff: noqa: ANN001, ANN202, PLR0917  (a kernel takes pointers and numbers, each by its place)
"""The draw of a step in two Triton kernels: of each row's token by inversion, and of the state that follows from it.

The first kernel reads the logits once, a span a program, and leaves the largest logit and the sum of weights of each
span. The second finds the span that a row's number falls into, and reads that span alone to find the token.
"""

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from upweight.models.kernels.launch import launch

_SPAN = 4096


class DrawState(NamedTuple):
    """What a draw reads and changes of each slot: see `slots.py`."""

    uniform_BN: Tensor
    token_B: Tensor
    length_B: Tensor
    drawn_B: Tensor
    limit_B: Tensor
    column_1: Tensor
    ids_KB: Tensor
    logps_KB: Tensor


def draw_step(logits_BV: Tensor, temperature: float, state: DrawState) -> None:
    """Draw a token in every slot with its log-prob at the temperature (0: the most likely one), and go on with it."""
    logits_BV = logits_BV.contiguous()
    slots, vocabulary = logits_BV.shape
    spans = triton.cdiv(vocabulary, _SPAN)
    top_BS, sum_BS = torch.empty(2, slots, spans, dtype=torch.float32, device=logits_BV.device)
    divisor = temperature or 1.0
    launch(
        _spans_kernel, (slots, spans),
        logits_BV, top_BS, sum_BS, state.column_1, vocabulary, divisor,
        SPAN=_SPAN, TEMPERED=divisor != 1, num_warps=4,
    )  # fmt: skip
    launch(
        _draw_kernel, (slots,),
        logits_BV, top_BS, sum_BS, *state, vocabulary, divisor, spans, state.uniform_BN.stride(0),
        state.uniform_BN.shape[1], state.ids_KB.stride(0),
        SPAN=_SPAN, SPANS_UP=triton.next_power_of_2(spans), GREEDY=temperature == 0, TEMPERED=divisor != 1, num_warps=8,
    )  # fmt: skip


@triton.jit
def _load_span(logits_at, column, vocabulary, divisor, TEMPERED: tl.constexpr):
    logits = tl.load(logits_at + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    if TEMPERED:
        logits = logits / divisor
    return logits


@triton.jit
def _spans_kernel(logits_at, top_at, sum_at, step_at, vocabulary, divisor, SPAN: tl.constexpr, TEMPERED: tl.constexpr):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits = _load_span(logits_at + row * vocabulary, span * SPAN + tl.arange(0, SPAN), vocabulary, divisor, TEMPERED)
    top = tl.max(logits, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)  # a span of which nothing can be drawn
    tl.store(top_at + row * tl.num_programs(1) + span, top)
    tl.store(sum_at + row * tl.num_programs(1) + span, tl.sum(tl.exp(logits - safe), 0))
    if (row == 0) & (span == 0):  # which the second kernel alone reads
        tl.store(step_at, tl.load(step_at) + 1)


@triton.jit(do_not_specialize=["numbers", "by_step"])
def _draw_kernel(
    logits_at, top_at, sum_at, uniform_at, token_at, length_at, drawn_at, limit_at, step_at, ids_at, logps_at,
    vocabulary, divisor, spans, by_slot, numbers, by_step,
    SPAN: tl.constexpr, SPANS_UP: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, SPANS_UP)
    tops = tl.load(top_at + row * spans + each, mask=each < spans, other=float("-inf"))
    sums = tl.load(sum_at + row * spans + each, mask=each < spans, other=0.0)
    top = tl.max(tops, 0)
    weights = sums.to(tl.float64) * tl.exp(tops - top).to(tl.float64)
    total = tl.sum(weights, 0)
    drawn = tl.load(drawn_at + row)
    target = total * tl.load(uniform_at + row * by_slot + tl.minimum(drawn, numbers - 1))
    if GREEDY:
        span = tl.min(tl.where(tops == top, each, SPANS_UP), 0)
        span = tl.minimum(span, spans - 1)
    else:
        span = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        # Rounding may lead behind the last span of any weight.
        last = tl.max(tl.where(weights > 0, each, 0), 0)
        span = tl.minimum(span, last)
    column = span * SPAN + tl.arange(0, SPAN)
    logits = _load_span(logits_at + row * vocabulary, column, vocabulary, divisor, TEMPERED)
    if GREEDY:
        token = tl.min(tl.where(logits == top, column, vocabulary - 1), 0)
    else:
        before = tl.sum(tl.where(each < span, weights, 0.0), 0)
        weight = tl.sum(tl.where(each == span, weights, 0.0), 0)
        inside = tl.cumsum(tl.exp(logits - top).to(tl.float64), 0)
        # just below one, so that rounding never leads to a token of weight zero behind the last
        share = tl.minimum(tl.maximum((target - before) / weight, 0.0), 1 - 1e-12)
        token = span * SPAN + tl.sum((inside <= share * tl.max(inside, 0)).to(tl.int32), 0)
    chosen = tl.sum(tl.where(column == token, logits, 0.0), 0)
    logp = (chosen - top).to(tl.float64) - tl.log(total)
    place = (tl.load(step_at) - 1) * by_step + row
    tl.store(ids_at + place, token.to(tl.int64))
    tl.store(logps_at + place, logp.to(tl.float32))
    if drawn < tl.load(limit_at + row):
        tl.store(token_at + row, token.to(tl.int64))
        tl.store(length_at + row, tl.load(length_at + row) + 1)
        tl.store(drawn_at + row, drawn + 1)
