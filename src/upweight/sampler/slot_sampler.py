"""Sampling in slots: sequences wait, take a free slot, and leave it when they end, whatever the others do."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from upweight.engine.packing import bucketed
from upweight.sampler.collect import CompletionCollector, Ints
from upweight.sampler.cuda_graphs import PendingTokens, SlotSteps, weight_state
from upweight.sampler.pages import PAGE, CachedPage, PageCache
from upweight.sampler.slots import BLOCK, Prefix, SlotSizes
from upweight.types import Prompts, Sampling

# Slots of a step; each is captured once. Between 384 and 512 torch's products take longer than those of 512 rows.
_SIZES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
_ADMIT = 16  # this share of the slots is free before prompts are prefilled for them, while others decode


@dataclass(eq=False)
class _Sequence:
    """A row of the collector in a slot."""

    row: int
    shared: CachedPage  # its last page that other sequences may read
    pages: list[int]  # all its pages, the shared ones first
    num_shared: int
    length: int  # position of its newest token, once the launched steps are done
    drawn: int  # tokens drawn, once the launched steps are done


@dataclass(eq=False)
class _Block:
    """Launched steps whose tokens are not read yet: the row in each slot, and the number of its first token."""

    row_B: Ints
    start_B: Ints
    pending: PendingTokens


def slots_for(count: int) -> int:
    """Return the slots of a step for so many sequences."""
    return next((size for size in _SIZES if size >= count), _SIZES[-1])


class SlotSampler:
    """Draws completions in slots; pages stay over calls, until the weights change."""

    def __init__(self, steps: SlotSteps, prefill_tokens: int, most_slots: int = _SIZES[-1]) -> None:
        self.slots, self.steps, self.prefill_tokens, self.most_slots = steps.slots, steps, prefill_tokens, most_slots
        self.cache = PageCache(0)
        self._weights: tuple[list[Any], int] | None = None  # addresses and changes of the weights that filled the cache
        self.prefilled_tokens = 0  # forwarded to fill pages, in all calls

    def forget(self) -> None:
        """Drop what is cached: the weights have changed."""
        self.cache.clear()

    @property
    def compile_seconds(self) -> float:
        """Return the seconds that compiling and recording have taken so far."""
        return self.steps.compile_seconds

    def bytes(self) -> int:
        """Return the memory that is held."""
        return self.slots.arena.bytes()

    def release(self) -> None:
        """Free all memory; the next call takes it again."""
        self.steps.release()
        self.slots.release()
        self.cache = PageCache(0)

    def sample(
        self, prompts: Prompts, sampling: Sampling, uniform_SN: Tensor, rows: CompletionCollector, cache_bytes: int
    ) -> None:
        """Draw the completions of all prompts into `rows`; keys and values take at most `cache_bytes`."""
        longest = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        table, largest = -(-bucketed(longest + BLOCK) // PAGE), self.slots.sizes.table
        slots = slots_for(min(len(uniform_SN), self.most_slots))
        fitting = max(cache_bytes // (self.slots.forward.token_bytes() * PAGE), 2 * table + 2)
        worst = min(slots + len(prompts), len(uniform_SN) + len(prompts)) * table + 2
        pages = self.slots.sizes.pages
        if pages < min(worst, fitting):
            pages = min(bucketed(worst), fitting)
        # Conversations get longer with each turn, and graphs are recorded again where a table has grown.
        table = max(table, 2 * largest) if table > largest else table
        self.slots.open(SlotSizes(slots, pages, table, sampling.max_new_tokens), sampling)
        self.cache.grow(self.slots.sizes.pages)
        addresses, versions = weight_state(self.slots.forward.base)
        if (addresses, versions) != self._weights:
            self._weights = addresses, versions
            self.cache.clear()
        self.steps.begin(addresses)
        self.steps.compile_ahead([size for size in _SIZES if size <= slots])
        _Call(self, prompts, sampling.max_new_tokens, uniform_SN, rows).run()


@dataclass(eq=False)
class _Ready:
    """A prefix in the cache: its whole pages, and a page that begins with the tokens after them."""

    whole: CachedPage
    tail: CachedPage | None


@dataclass(eq=False)
class _Missing:
    """A prefix to be completed: where it branches off the cache, with how many more tokens, and its further pages."""

    ids: tuple[int, ...]
    node: CachedPage
    source: CachedPage | None
    cached: int
    pages: list[int]


class _Call:
    """One call of `SlotSampler.sample`."""

    def __init__(
        self, sampler: SlotSampler, prompts: Prompts, limit: int, uniform_SN: Tensor, rows: CompletionCollector
    ) -> None:
        self.sampler, self.slots, self.steps, self.cache = sampler, sampler.slots, sampler.steps, sampler.cache
        self.prompts, self.limit, self.uniform_SN, self.rows = prompts, limit, uniform_SN, rows
        self.waiting = deque(range(len(uniform_SN)))
        self.launched: deque[_Block] = deque()
        size = self.slots.size = slots_for(min(len(self.waiting), sampler.most_slots))
        self.sequences: list[_Sequence | None] = [None] * size
        self.table_BT = np.zeros((size, self.slots.sizes.table), np.int32)

    def run(self) -> None:
        """Sample until every row has ended."""
        while self.waiting or any(self.sequences):
            self._admit()
            self._shrink()
            self._make_room()
            self._launch()
            while len(self.launched) > self.steps.lag:
                self._take()

    def _ids(self, row: int) -> list[int]:
        """Return all known tokens of a row, the prompt first."""
        return [*self.prompts[row // self.rows.count], *self.rows.ids(row)]

    def _take(self) -> None:
        """Wait for the oldest launched steps, collect their tokens, and free the slots of rows that have ended."""
        block = self.launched.popleft()
        ids_KB, logps_KB, routes_KBLA = block.pending()
        self.rows.take(block.start_B, ids_KB, logps_KB, block.row_B, routes_KBLA)
        self._leave([s for s, one in enumerate(self.sequences) if one is not None and not self.rows.alive_S[one.row]])

    def _leave(self, slots: list[int]) -> None:
        """Take sequences out of their slots; the pages of known tokens stay readable until their room is needed."""
        for slot in slots:
            sequence = self.sequences[slot]
            assert sequence is not None
            ids = self._ids(sequence.row)[:-1]  # the last one may not be fed yet
            shared, used = sequence.num_shared, -(-len(ids) // PAGE)
            self.cache.insert(sequence.shared, ids[shared * PAGE :], sequence.pages[shared:used])
            self.cache.free(sequence.pages[max(used, shared) :])
            self.cache.release(sequence.shared)
            self.sequences[slot] = None
            self.table_BT[slot] = 0
        self.slots.stop(slots)

    def _admit(self) -> None:
        """Let waiting rows take free slots, as far as pages reach; their prefixes are completed together."""
        free = [slot for slot, sequence in enumerate(self.sequences) if sequence is None]
        running = len(self.sequences) - len(free)
        if len(free) < min(len(self.sequences) // _ADMIT, len(self.waiting)) and running:
            return
        ready: dict[tuple[int, ...], _Ready] = {}
        missing: dict[tuple[int, ...], _Missing] = {}
        chosen: list[tuple[int, list[int]]] = []
        while self.waiting and len(chosen) < len(free):
            ids = self._ids(self.waiting[0])
            prefix = tuple(ids[:-1])
            # Without a further page for each sequence the newest would soon have to leave again.
            busy = running + len(chosen)
            if busy and self.cache.available < 2 * busy + -(-len(prefix) // PAGE) + 2:
                break
            if prefix not in ready and prefix not in missing:
                if sum(len(one.ids) - one.cached for one in missing.values()) >= self.sampler.prefill_tokens:
                    break
                cached = self._look_up(prefix)
                if isinstance(cached, _Ready):
                    ready[prefix] = cached
                else:
                    missing[prefix] = cached
            chosen.append((self.waiting.popleft(), ids))
        ready |= self._complete(missing)
        self._place(free, chosen, ready)
        for one in ready.values():
            self._release(one.whole, one.tail)

    def _look_up(self, prefix: tuple[int, ...]) -> _Ready | _Missing:
        """Return a prefix as far as it is cached; its pages are read until they are released."""
        node, source, common = self.cache.match(prefix)
        for page in (node, source):
            if page is not None:
                self.cache.read(page)
        depth = len(node.path())
        if depth * PAGE + common == len(prefix):
            return _Ready(node, source)
        pages = self.cache.allocate(-(-len(prefix) // PAGE) - depth)
        assert pages is not None, "there are pages for the longest sequence beside those of the running ones"
        return _Missing(prefix, node, source, depth * PAGE + common, pages)

    def _release(self, *pages: CachedPage | None) -> None:
        for page in pages:
            if page is not None:
                self.cache.release(page)

    def _complete(self, missing: dict[tuple[int, ...], _Missing]) -> dict[tuple[int, ...], _Ready]:
        """Prefill prefixes, and put their pages into the cache."""
        if not missing:
            return {}
        copied = [(one.source.page, one.pages[0]) for one in missing.values() if one.source is not None]
        self.slots.copy_pages(copied)
        self.steps.prefill(
            [
                Prefix(one.ids, one.cached, [*(node.page for node in one.node.path()), *one.pages])
                for one in missing.values()
            ]
        )
        self.sampler.prefilled_tokens += sum(len(one.ids) - one.cached for one in missing.values())
        ready: dict[tuple[int, ...], _Ready] = {}
        for prefix, one in missing.items():
            last = self.cache.insert(one.node, prefix[len(one.node.path()) * PAGE :], one.pages)
            whole, tail = (last, None) if len(last.ids) == PAGE else (last.parent, last)
            assert whole is not None
            ready[prefix] = _Ready(whole, tail)
            for page in (whole, tail):
                if page is not None:
                    self.cache.read(page)
            self._release(one.node, one.source)
        return ready

    def _place(
        self, free: list[int], chosen: list[tuple[int, list[int]]], ready: dict[tuple[int, ...], _Ready]
    ) -> None:
        """Put rows with their known tokens into free slots."""
        copied: list[tuple[int, int]] = []
        placed: list[tuple[int, list[int]]] = []
        for slot, (row, ids) in zip(free, chosen, strict=False):
            one = ready[tuple(ids[:-1])]
            pages = [node.page for node in one.whole.path()]
            num_shared = len(pages)
            if one.tail is not None:
                mine = self.cache.allocate(1)
                assert mine is not None, "a page was left for each sequence"
                copied.append((one.tail.page, mine[0]))
                pages += mine
            self.cache.read(one.whole)
            drawn = len(ids) - len(self.prompts[row // self.rows.count])
            self.sequences[slot] = _Sequence(row, one.whole, pages, num_shared, len(ids) - 1, drawn)
            self.table_BT[slot, : len(pages)] = pages
            shift = self.slots.forward.images.shift(ids) if self.slots.forward.shifts else 0
            placed.append((slot, [ids[-1], len(ids) - 1, drawn, self.limit, shift]))
        if placed:
            self.slots.copy_pages(copied)
            index = [slot for slot, _ in placed]
            state_5M = np.array([state for _, state in placed]).T
            self.slots.place(index, state_5M, self.uniform_SN[[row for row, _ in chosen]])
            self.slots.mark_seen(index, [ids for _, ids in chosen])
            self._take_prompt_routes(index)

    def _take_prompt_routes(self, slots: list[int]) -> None:
        """Collect the experts of the prompts of sequences that have just taken a slot."""
        for sequence in (self.sequences[slot] for slot in slots):
            assert sequence is not None
            prompt = sequence.row // self.rows.count
            if self.slots.route_pool is not None and self.rows.wants_routes(prompt):
                fed = len(self.prompts[prompt]) - 1
                self.rows.take_prompt_routes(prompt, self.slots.read_routes(sequence.pages, fed))

    def _shrink(self) -> None:
        """Decode fewer slots where fewer sequences are left."""
        running = [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]
        size = slots_for(len(running))
        if self.waiting or size >= len(self.sequences):
            return
        empty = [slot for slot, sequence in enumerate(self.sequences) if sequence is None]
        order = (running + empty)[:size]
        self.slots.reorder(order)
        self.slots.size = size
        self.sequences = [self.sequences[slot] for slot in order]
        self.table_BT = self.table_BT[order]

    def _make_room(self) -> None:
        """Give each sequence the pages of its next steps; where there are none the one with fewest tokens waits."""
        for slot, sequence in enumerate(self.sequences):
            if sequence is None:
                continue
            last = len(self.prompts[sequence.row // self.rows.count]) - 1 + self.limit
            wanted = min(sequence.length + BLOCK - 1, last) // PAGE + 1 - len(sequence.pages)
            while wanted > 0 and self.sequences[slot] is sequence:
                pages = self.cache.allocate(wanted)
                if pages is None:
                    self._preempt()
                    continue
                self.table_BT[slot, len(sequence.pages) : len(sequence.pages) + wanted] = pages
                sequence.pages += pages
                break

    def _preempt(self) -> None:
        """Let the sequence with the fewest tokens wait: it will go on from its known tokens, with the same numbers."""
        running = [(one.drawn, -one.row, slot) for slot, one in enumerate(self.sequences) if one is not None]
        slot = min(running)[2]
        sequence = self.sequences[slot]
        assert sequence is not None
        assert len(running) > 1, "there are pages for the longest sequence"
        for block in self.launched:
            block.row_B[block.row_B == sequence.row] = -1
        self.waiting.appendleft(sequence.row)
        self._leave([slot])

    def _launch(self) -> None:
        """Launch the next steps of all slots."""
        row_B, start_B = np.full(len(self.sequences), -1), np.zeros(len(self.sequences), np.int64)
        for slot, sequence in enumerate(self.sequences):
            if sequence is not None:
                row_B[slot], start_B[slot] = sequence.row, sequence.drawn
        count = min(BLOCK, self.limit - min(one.drawn for one in self.sequences if one is not None))
        if count <= 0:  # all tokens are launched, and some are not read yet
            self._take()
            return
        self.slots.set_table(self.table_BT)
        self.launched.append(_Block(row_B, start_B, self.steps.run(count)))
        for sequence in self.sequences:
            if sequence is not None:
                goes_on = min(count, self.limit - sequence.drawn)
                sequence.length += goes_on
                sequence.drawn += goes_on
