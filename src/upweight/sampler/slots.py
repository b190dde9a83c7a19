"""Decoding on the device in slots: each holds one sequence, which begins and ends whatever the others do.

A slot feeds its newest token, whose position is the slot's length, stores its key and value in the slot's pages, and
draws the next token. Slots that read the same prompt have its pages in their tables. A slot without a sequence, or with
all its tokens drawn, repeats its last step, so a step has the same kernels for any sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from upweight.engine.attention.rules import AttentionParams, Rule
from upweight.engine.attention.segments import SegmentPlan, segment_attention
from upweight.engine.packing import fold
from upweight.sampler.attention import CallAttention, Rotation, paged_attention
from upweight.sampler.draw import draw, only_draws
from upweight.sampler.forward import BufferPool, CachedForward
from upweight.sampler.image_prompts import text_ids
from upweight.sampler.pages import PAGE
from upweight.types import Sampling

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.sampler.kernels.draw import DrawState, draw_step
    from upweight.sampler.kernels.paged_attention import paged_step
else:
    paged_step = draw_step = DrawState = None

# Not cuDNN's, which plans again for every length of a prompt, for a millisecond in each layer.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
BLOCK = 16  # steps launched before the host reads their tokens


@dataclass(frozen=True)
class SlotSizes:
    """The largest numbers of a sampler: slots, pages in all and of one slot, and tokens of a completion."""

    slots: int
    pages: int
    table: int
    new_tokens: int


@dataclass(frozen=True)
class Prefix:
    """Tokens to prefill: `pages` hold all of them, the first `cached` are there already."""

    ids: Sequence[int]
    cached: int
    pages: Sequence[int]


class Slots:
    """The state of all slots on the device, and the steps that change it."""

    def __init__(self, forward: CachedForward) -> None:
        self.forward, self.device = forward, forward.device
        self.arena = BufferPool(forward.device)
        self.draw = draw
        self.sizes = SlotSizes(0, 0, 0, 0)
        self.size = 0  # slots that a step decodes, the first ones
        self.sampling = Sampling(max_new_tokens=0)  # only the settings that change the draw of a token

    def open(self, sizes: SlotSizes, sampling: Sampling) -> None:
        """Allocate buffers; what was allocated for larger sizes stays, so that its address does.

        Pages that there were keep what they hold, at most in another place.
        """
        old, view, kept = self.sizes, self.arena.view, partial(self.arena.view, keep=True)
        sizes = SlotSizes(*(max(pair) for pair in zip(vars(old).values(), vars(sizes).values(), strict=True)))
        self.sizes = sizes
        self.sampling = only_draws(sampling)
        self.pools = [
            tuple(
                kept((number, width_of), (sizes.pages, layer.heads, PAGE, getattr(layer, width_of)), layer.dtype)
                for width_of in ("key_width", "value_width")
            )
            for number, layer in enumerate(self.forward.layers)
        ]
        self.table_BT = view("table", (sizes.slots, sizes.table), torch.int32)
        self.token_B = view("token", (sizes.slots,), torch.long)
        self.length_B = view("length", (sizes.slots,), torch.long)
        self.shift_B = view("shift", (sizes.slots,), torch.long)  # of positions after images
        self.drawn_B = view("drawn", (sizes.slots,), torch.long)
        self.limit_B = view("limit", (sizes.slots,), torch.long)
        self.uniform_BN = view("uniform", (sizes.slots, sizes.new_tokens), torch.float64)
        self.column_1 = view("column", (1,), torch.long)
        self.ids_KB = view("ids", (BLOCK, sizes.slots), torch.long)
        self.logps_KB = view("logps", (BLOCK, sizes.slots), torch.float32)
        self.routes_KBLA = self.routes_BLA = self.route_pool = None
        if (records := self.forward.records) is not None:
            shape = records.layers, records.top_k
            self.routes_BLA = view("routes", (sizes.slots, *shape), torch.int16)
            self.routes_KBLA = view("routes of steps", (BLOCK, sizes.slots, *shape), torch.int16)
            self.route_pool = kept("routes of pages", (sizes.pages, PAGE, *shape), torch.int16)
        self.seen_BV = None
        if sampling.repetition_penalty != 1:
            vocabulary = self.forward.base.config.get_text_config().vocab_size
            self.seen_BV = view("seen", (sizes.slots, vocabulary), torch.bool)
        if old != sizes:
            self.arena.moved += 1
        self.limit_B.zero_()
        self.length_B.zero_()
        self.table_BT.zero_()

    def release(self) -> None:
        """Free all buffers."""
        self.arena.clear()
        self.sizes = SlotSizes(0, 0, 0, 0)
        self.open(self.sizes, self.sampling)

    def upload(self, values: NDArray[Any]) -> Tensor:
        """Return values on the device, without waiting for the work that is launched there."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def place(self, slots: Sequence[int], state_5M: NDArray[np.int64], uniform_MN: Tensor) -> None:
        """Fill slots: newest token, its place, tokens drawn, tokens to draw in all, shift; the numbers that draw."""
        index_M, *values = self.upload(np.concatenate([[slots], state_5M]))
        states = self.token_B, self.length_B, self.drawn_B, self.limit_B, self.shift_B
        for target, value_M in zip(states, values, strict=True):
            target.index_copy_(0, index_M, value_M)
        self.uniform_BN[:, : uniform_MN.shape[1]].index_copy_(0, index_M, self.upload(uniform_MN.numpy()))

    def mark_seen(self, slots: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """Set the tokens that a repetition penalty applies to in some slots."""
        if self.seen_BV is not None:
            for slot, seen in zip(slots, ids, strict=True):
                self.seen_BV[slot] = False
                self.seen_BV[slot, self.upload(np.asarray(text_ids(seen)))] = True

    def stop(self, slots: Sequence[int]) -> None:
        """Let slots repeat their last step until something is placed in them."""
        if slots:
            self.limit_B.index_fill_(0, self.upload(np.asarray(slots)), 0)

    def set_table(self, table_BT: NDArray[np.int32]) -> None:
        """Set the pages of the first slots."""
        self.table_BT[: len(table_BT)] = self.upload(table_BT.copy())

    def reorder(self, slots: Sequence[int]) -> None:
        """Move some slots to the beginning, in this order; keys and values stay where they are."""
        index_M = self.upload(np.asarray(slots))
        places = self.table_BT, self.length_B, self.shift_B
        for state in (*places, self.token_B, self.drawn_B, self.limit_B, self.uniform_BN):
            state[: len(slots)] = state[index_M]
        if self.seen_BV is not None:
            self.seen_BV[: len(slots)] = self.seen_BV[index_M]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages of all layers, each from the first of a pair to the second."""
        if pairs:
            source_M, target_M = self.upload(np.array(pairs).T.copy())
            routes = [] if self.route_pool is None else [self.route_pool]
            for pool in [*(pool for pools in self.pools for pool in pools), *routes]:
                pool.index_copy_(0, target_M, pool.index_select(0, source_M))

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Forward the tokens of prefixes that are not cached, and store their keys and values."""
        arrays = [np.asarray(prefix.ids, np.int64) for prefix in prefixes]
        forest = fold(arrays)
        cached_N = np.zeros(len(forest.ids_N), np.bool_)
        places_N = np.zeros(len(forest.ids_N), np.int64)  # page * PAGE + offset of each token, of any of its prefixes
        source, target = [], []
        for prefix, path in zip(prefixes, forest.paths, strict=True):
            place = (
                np.asarray(prefix.pages, np.int64)[np.arange(len(path)) // PAGE] * PAGE + np.arange(len(path)) % PAGE
            )
            cached_N[path[: prefix.cached]] = True
            places_N[path] = place
            source.append(path[prefix.cached :])
            target.append(place[prefix.cached :])
        new = np.flatnonzero(~cached_N)
        host = [forest.ids_N[new], forest.position_N[new], new, np.flatnonzero(cached_N), places_N[cached_N]]
        ids_M, position_M, *indices = map(self.upload, [*host, np.concatenate(source), np.concatenate(target)])
        places = map(torch.from_numpy, (forest.end_N, forest.position_N))
        attend = _Prefilling(self.pools, ~cached_N, *places, *indices)
        images = self.forward.images.inputs(arrays, forest, new, self.device)
        at = torch.zeros(0, dtype=torch.long, device=self.device)
        routes_MLA = self.forward.route_buffer(len(ids_M))
        self.forward.logits(ids_M[None], position_M[None], attend, at, images, routes_NLA=routes_MLA)
        if routes_MLA is not None and self.route_pool is not None:
            new_M, cached_C, cached_place_C, source_W, target_W = indices
            pool_RLA = self.route_pool.flatten(0, 1)
            row_NLA = routes_MLA.new_empty(len(forest.ids_N), *routes_MLA.shape[1:])
            row_NLA[new_M], row_NLA[cached_C] = routes_MLA, pool_RLA[cached_place_C]
            pool_RLA[target_W] = row_NLA[source_W]

    def read_routes(self, pages: Sequence[int], tokens: int) -> NDArray[np.int16]:
        """Return the experts of the first tokens in some pages; on a GPU they are there once a later step is."""
        assert self.route_pool is not None
        routes_NLA = self.route_pool[self.upload(np.asarray(pages, np.int64))].flatten(0, 1)[:tokens]
        if self.device.type != "cuda":
            return routes_NLA.numpy()
        host = torch.empty(routes_NLA.shape, dtype=routes_NLA.dtype, pin_memory=True)
        return host.copy_(routes_NLA, non_blocking=True).numpy()

    def forward_nothing(self, rows: int) -> None:
        """Forward so many tokens as a prompt without attention, so that what is launched for it is compiled."""
        zeros_1N = torch.zeros(1, rows, dtype=torch.long, device=self.device)

        def attend(call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
            return query.new_zeros(*query.shape[:-1], value.shape[-1])

        self.forward.logits(zeros_1N, zeros_1N, attend, zeros_1N[0, :0])

    def step(self) -> None:
        """Draw one more token in every slot."""
        size = self.size
        table_BT, length_B = self.table_BT[:size], self.length_B[:size]
        kernels = paged_step is not None and length_B.is_cuda
        attend: CallAttention = (_KernelStep if kernels else _PlainStep)(self.pools, table_BT, length_B)
        position_B = length_B + self.shift_B[:size] if self.forward.shifts else length_B
        routes_BLA = None if self.routes_BLA is None else self.routes_BLA[:size]
        tokens_B1 = self.token_B[:size, None]
        logits_BV = self.forward.logits(tokens_B1, position_B[:, None], attend, None, routes_NLA=routes_BLA)
        if routes_BLA is not None:
            self._keep_routes(routes_BLA, table_BT, length_B)
        sampling = self.sampling
        truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or bool(sampling.suppress_ids)
        if draw_step is None or DrawState is None or not kernels or truncates or self.seen_BV is not None:
            self._draw_tokens(logits_BV)
            return
        slots = [x[:size] for x in (self.uniform_BN, self.token_B, length_B, self.drawn_B, self.limit_B)]
        state = DrawState._make([*slots, self.column_1, self.ids_KB, self.logps_KB])
        draw_step(logits_BV, sampling.temperature, state)

    def _keep_routes(self, routes_BLA: Tensor, table_BT: Tensor, length_B: Tensor) -> None:
        """Store the experts of the newest tokens beside their keys, and for the host."""
        assert self.route_pool is not None
        assert self.routes_KBLA is not None
        page_B = table_BT.gather(1, length_B[:, None] // PAGE)[:, 0].long()
        self.route_pool[page_B, length_B % PAGE] = routes_BLA
        self.routes_KBLA[:, : len(routes_BLA)].index_copy_(0, self.column_1, routes_BLA[None])

    def _draw_tokens(self, logits_BV: Tensor) -> None:
        """Draw the token of every slot, and go on with it where tokens are left to draw."""
        size = self.size
        token_B, length_B = self.token_B[:size], self.length_B[:size]
        drawn_B, limit_B = self.drawn_B[:size], self.limit_B[:size]
        number_B1 = drawn_B.clamp(max=self.sizes.new_tokens - 1)[:, None]
        seen_BV = None if self.seen_BV is None else self.seen_BV[:size]
        uniform_B = self.uniform_BN[:size].gather(1, number_B1)[:, 0]
        next_B, logp_B = self.draw(logits_BV, uniform_B, self.sampling, seen_BV)
        self.ids_KB[:, :size].index_copy_(0, self.column_1, next_B[None])
        self.logps_KB[:, :size].index_copy_(0, self.column_1, logp_B[None])
        goes_on_B = drawn_B < limit_B
        token_B.copy_(torch.where(goes_on_B, next_B, token_B))
        length_B += goes_on_B
        drawn_B += goes_on_B
        self.column_1 += 1
        if seen_BV is not None:
            seen_BV.scatter_(1, token_B[:, None], True)


@dataclass(eq=False)
class _PlainStep:
    """Attention of the newest token of each slot, whose key and value it stores."""

    pools: Sequence[tuple[Tensor, ...]]
    table_BT: Tensor
    length_B: Tensor

    def __call__(self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        keys, values = self.pools[call]
        page_B = self.table_BT.gather(1, self.length_B[:, None] // PAGE)[:, 0].long()
        keys[page_B, :, self.length_B % PAGE] = key[:, :, 0]
        values[page_B, :, self.length_B % PAGE] = value[:, :, 0]
        return paged_attention(query, (keys, values), self.table_BT, self.length_B, params)


@dataclass(eq=False)
class _KernelStep:
    """The same as one kernel, which can also norm and rotate queries and keys."""

    pools: Sequence[tuple[Tensor, ...]]
    table_BT: Tensor
    length_B: Tensor

    def __call__(self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        return self._attend(call, query, key, value, params, None)

    def attend_rotated(  # noqa: PLR0917 - as `__call__`, with one argument more
        self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, rotation: Rotation
    ) -> Tensor:
        return self._attend(call, query, key, value, params, rotation)

    def _attend(  # noqa: PLR0917
        self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, rotation: Rotation | None
    ) -> Tensor:
        keys, values = self.pools[call]
        assert paged_step is not None
        return paged_step(query, key, value, (keys, values), (self.table_BT, self.length_B), params, rotation)


@dataclass(eq=False)
class _Prefilling:
    """Attention of new tokens over cached and new ones of packed prefixes, whose keys and values it stores."""

    pools: Sequence[tuple[Tensor, ...]]
    is_new_N: NDArray[np.bool_]
    end_N: Tensor  # on the host, as is the next
    position_N: Tensor
    new_M: Tensor
    cached_C: Tensor
    cached_place_C: Tensor
    source_W: Tensor
    target_W: Tensor

    def __post_init__(self) -> None:
        self._plans: dict[Rule, SegmentPlan] = {}

    def __call__(self, call: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        if params.rule not in self._plans:
            self._plans[params.rule] = SegmentPlan.of(self.end_N, self.position_N, params.rule, self.is_new_N)
        rows = []
        for pool, new in zip(self.pools[call], (key, value), strict=True):
            row = new
            if len(self.cached_C):
                row = self._spread(new)
                row[0, :, self.cached_C] = pool[self.cached_place_C // PAGE, :, self.cached_place_C % PAGE].transpose(
                    0, 1
                )
            pool[self.target_W // PAGE, :, self.target_W % PAGE] = row[0][:, self.source_W].transpose(0, 1)
            rows.append(row)
        with sdpa_kernel(_BACKENDS):
            return segment_attention(query, rows[0], rows[1], self._plans[params.rule], params)

    def _spread(self, new: Tensor) -> Tensor:
        """Return a row of all tokens with the new ones at their places, and zeros elsewhere."""
        row = new.new_zeros(1, new.shape[1], len(self.end_N), new.shape[-1])
        row[:, :, self.new_M] = new
        return row
