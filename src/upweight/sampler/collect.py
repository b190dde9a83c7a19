"""Collect sampled tokens on the host, and find where completions end and which prompts are done."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upweight.types import Completion, Done

Ints = NDArray[np.int64]
OnTokens = Callable[[int, list[int]], None] | None  # called with the number of a completion and its new tokens
_SLACK = 8  # further tokens decoded before a stop string: a first token may lose a space or half a letter


class StopStrings:
    """Finds stop strings in decoded text, also across token borders."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = [string for string in strings if string]
        self._reach = max((len(string.encode()) for string in self._strings), default=0) + _SLACK

    def __bool__(self) -> bool:
        return bool(self._strings)

    def first(self, ids: Sequence[int], known: int) -> int | None:
        """Return the number of tokens that complete a stop string, when none is in the first `known` tokens."""
        if not self._has_stop(ids, known, len(ids)):
            return None
        return next((count for count in range(known + 1, len(ids)) if self._has_stop(ids, count - 1, count)), len(ids))

    def _has_stop(self, ids: Sequence[int], known: int, count: int) -> bool:
        """Return whether the first `count` tokens hold a stop string that the first `known` do not hold."""
        text = self._tokenizer.decode(ids[max(0, known - self._reach) : count], skip_special_tokens=False)
        return any(string in text for string in self._strings)


class CompletionCollector:
    """All completions of one call; row `prompt * count + member`."""

    def __init__(
        self,
        prompts: int,
        count: int,
        completion_length: int,
        ends: Collection[int] = (),
        stops: StopStrings | None = None,
        *,
        version: int = 0,
        done: Done | None = None,
        on_tokens: OnTokens = None,
        route_shape: tuple[int, int] | None = None,  # layers and experts of a token, where they are recorded
    ) -> None:
        self.count, self._completion_length, self._version = count, completion_length, version
        self.ends = np.fromiter(sorted(ends), np.int64, len(ends))
        self.stops, self._done, self._on_tokens = stops, done, on_tokens
        self._ids_SN = np.zeros((prompts * count, completion_length + 1), np.int64)
        self._logps_SN = np.zeros((prompts * count, completion_length + 1), np.float32)
        self._length_S = np.zeros(prompts * count, np.int64)
        self._finished_S = np.zeros(prompts * count, np.bool_)
        self.alive_S = np.ones(prompts * count, np.bool_)
        self._unfinished_P = np.full(prompts, count)
        # The experts of the token that drew each token: the last one of the prompt, and all but the last of a row.
        self._routes_SNLA: NDArray[np.int16] | None = None
        if route_shape is not None:
            self._routes_SNLA = np.zeros((prompts * count, completion_length + 1, *route_shape), np.int16)
        self._prompt_routes: dict[int, NDArray[np.int16]] = {}

    def wants_routes(self, prompt: int) -> bool:
        """Return whether the experts of a prompt's tokens are collected, and not known yet."""
        return self._routes_SNLA is not None and prompt not in self._prompt_routes

    def take_prompt_routes(self, prompt: int, routes_NLA: NDArray[np.int16]) -> None:
        """Store the experts of a prompt's tokens but the last."""
        self._prompt_routes[prompt] = routes_NLA

    def take(
        self,
        start: int | Ints,
        ids_KB: Ints,
        logps_KB: NDArray[np.float32],
        slots: Ints,
        routes_KBLA: NDArray[np.int16] | None = None,
    ) -> None:
        """Store tokens of the rows in `slots` (-1: none), the first being number `start`; ended rows are skipped.

        `routes_KBLA`: the experts of the tokens that drew them.
        """
        flat, limit = slots.reshape(-1), self._completion_length
        used = np.flatnonzero((flat >= 0) & self.alive_S[flat])
        rows, block_UK = flat[used], ids_KB[:, used].T
        start_U = np.broadcast_to(start, flat.shape)[used]
        # The column behind the last takes the tokens beyond the limit.
        column_UK = np.minimum(start_U[:, None] + np.arange(len(ids_KB)), limit)
        self._ids_SN[rows[:, None], column_UK] = block_UK
        self._logps_SN[rows[:, None], column_UK] = logps_KB[:, used].T
        if self._routes_SNLA is not None and routes_KBLA is not None:
            self._routes_SNLA[rows[:, None], column_UK] = routes_KBLA[:, used].swapaxes(0, 1)
        is_end = np.isin(block_UK, self.ends) & (column_UK < limit)
        ended = np.logical_or.reduce(is_end, 1)
        stop_U = np.minimum(start_U + len(ids_KB), limit)
        length = np.where(ended, start_U + is_end.argmax(1) + 1, stop_U)
        if self.stops:
            for at, row in enumerate(rows.tolist()):
                stopped = self.stops.first(self._ids_SN[row, : length[at]].tolist(), int(start_U[at]))
                if stopped is not None:
                    ended[at], length[at] = True, stopped
        self._length_S[rows], self._finished_S[rows] = length, ended
        if self._on_tokens is not None:
            for row, first, end in zip(rows.tolist(), start_U.tolist(), length.tolist(), strict=True):
                self._on_tokens(row, self._ids_SN[row, first:end].tolist())
        over = rows[ended | (stop_U >= limit)]
        self.alive_S[over] = False
        np.subtract.at(self._unfinished_P, over // self.count, 1)
        for prompt in np.unique(over // self.count).tolist():
            if self._unfinished_P[prompt] == 0 and self._done is not None:
                self._done(prompt, self.completions(prompt))

    def ids(self, row: int) -> list[int]:
        """Return the tokens of a row that are known."""
        return self._ids_SN[row, : self._length_S[row]].tolist()

    def completions(self, prompt: int) -> list[Completion]:
        """Return the completions of a prompt that is done."""
        return [
            Completion(
                ids=self._ids_SN[row, :length].tolist(),
                logps=self._logps_SN[row, :length].tolist(),
                versions=[self._version] * length,
                finished=bool(self._finished_S[row]),
                routes=self._routes(row, length),
            )
            for row in range(prompt * self.count, (prompt + 1) * self.count)
            for length in (int(self._length_S[row]),)
        ]

    def _routes(self, row: int, length: int) -> NDArray[np.int16] | None:
        """Return the experts of a row's tokens, the prompt's first; the last one has not been fed."""
        if self._routes_SNLA is None:
            return None
        drawn_NLA = self._routes_SNLA[row, :length]
        last_1LA = np.full((1, *drawn_NLA.shape[1:]), -1, np.int16)
        return np.concatenate([self._prompt_routes[row // self.count], drawn_NLA, last_1LA])


def smaller_grid(slots: Ints, alive_S: NDArray[np.bool_], share: float) -> tuple[Ints, Ints, Ints] | None:
    """Return the groups to keep, the slots to keep for each, and the new rows by (group, member)."""
    # Finished groups are dropped; members shrink to the most that run in any group. None unless at most `share` of the
    # slots remain. Unused slots have row -1.
    runs = (slots >= 0) & alive_S[slots]
    by_group = runs.sum(1)
    kept = np.flatnonzero(by_group)
    members = int(by_group.max())
    if len(kept) * members > share * slots.size:
        return None
    order = np.argsort(~runs[kept], axis=1, kind="stable")[:, :members]
    rows = np.take_along_axis(np.where(runs, slots, -1)[kept], order, 1)
    return kept, (kept[:, None] * slots.shape[1] + order).reshape(-1), rows
