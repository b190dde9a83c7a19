"""How decoding steps are launched: one by one, or replayed as CUDA graphs."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upweight.engine.packing import bucketed
from upweight.log import warn_once
from upweight.rollout.decode import Decoder

Arrived = Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]

_BLOCK = 16  # steps launched before the host looks at what arrived
_NARROWEST = 128  # attention covers at least so many columns of a completion
_MOST_GRAPHS = 64


class PlainSteps:
    """Every step launched as it comes; shapes are exactly what is needed."""

    block = 1
    lag = 0
    shrink_below = 0.9

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def rounded(self, count: int) -> int:
        """The size of a grid's side for `count` groups or members."""
        return count

    def rounded_room(self, tokens: int) -> int:
        """The columns kept for completions of up to `tokens`."""
        return tokens

    def rounded_prompt(self, tokens: int) -> int:
        """The columns kept for prompts of up to `tokens`."""
        return tokens

    def advance(self, column: int) -> None:
        """Sample the tokens of a column, those before it being there."""
        self._decoder.advance(column)

    def read(self, start: int, stop: int) -> Arrived:
        """The tokens and log-probs of some columns, which can be asked for later."""
        ids_KB, logps_KB = (x[start:stop].numpy().copy() for x in (self._decoder.ids_NB, self._decoder.logps_NB))
        return lambda: (ids_KB, logps_KB)

    def release(self) -> None:
        """Nothing is kept."""


class GraphSteps:
    """Steps on a GPU: captured once for each shape, then replayed; the host looks one block behind.

    Sides of grids, lengths and widths take few values, so that graphs serve again over calls and training steps.
    Weights are read where they lie: whoever changes them in place needs no new graph.
    """

    block = _BLOCK
    lag = 1
    shrink_below = 0.5

    def __init__(self, decoder: Decoder, compiled: bool) -> None:
        self._decoder = decoder
        self._graphs: OrderedDict[Any, torch.cuda.CUDAGraph] = OrderedDict()
        self._moved = decoder.arena.moved
        self._pool: Any = None
        self._capturable = True
        if compiled:
            decoder.body = torch.compile(decoder.body, dynamic=False)

    def rounded(self, count: int) -> int:
        """1, 2, 3, 4, 6, 8, 12, 16, ...: at most half more than asked for."""
        power = 1 << max(0, count - 1).bit_length()
        return power if count > power * 3 // 4 or power < 4 else power * 3 // 4

    def rounded_room(self, tokens: int) -> int:
        """The columns kept for completions of up to `tokens`."""
        return bucketed(tokens)

    def rounded_prompt(self, tokens: int) -> int:
        """The columns kept for prompts of up to `tokens`."""
        return bucketed(tokens)

    def advance(self, column: int) -> None:
        """Sample the tokens of a column, those before it being there."""
        decoder = self._decoder
        width = min(decoder.grid.room, max(_NARROWEST, 1 << (column - 1).bit_length()))
        if not self._capturable:
            decoder.advance(width)
            return
        if self._moved != decoder.arena.moved:
            self._graphs.clear()
            self._moved = decoder.arena.moved
        key = (decoder.grid, width, decoder.sampling)
        if key not in self._graphs:
            self._capture(key, width)
            return
        self._graphs.move_to_end(key)
        self._graphs[key].replay()

    def _capture(self, key: Any, width: int) -> None:
        """Run a step as it is, which also warms kernels up, then record the same step for later."""
        self._decoder.advance(width)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._decoder.advance(width)
        except RuntimeError as error:
            self._capturable = False
            warn_once(
                f"{type(self._decoder.base).__name__} cannot be recorded as a CUDA graph, so sampling launches every "
                f"kernel anew: {str(error).splitlines()[0]}"
            )
            return
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def read(self, start: int, stop: int) -> Arrived:
        """The tokens and log-probs of some columns, on their way while further steps are launched."""
        copies = [_to_host(x[start:stop]) for x in (self._decoder.ids_NB, self._decoder.logps_NB)]
        event = torch.cuda.Event()
        event.record()

        def arrived() -> tuple[NDArray[np.int64], NDArray[np.float32]]:
            event.synchronize()
            return copies[0].numpy(), copies[1].numpy()

        return arrived

    def release(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()
        self._pool = None


def _to_host(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
