"""Launch decoding steps one by one, or replay them as CUDA graphs."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

from upweight.engine.packing import bucketed
from upweight.log import warn_once
from upweight.models.modules import every_module, replaced_forwards
from upweight.sampler.decode import Decoder
from upweight.sampler.draw import draw
from upweight.types import Prompts

PendingTokens = Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]  # waits for tokens and log-probs

_BLOCK = 16  # steps launched before the host reads their tokens
_MOST_GRAPHS = 64
_PADDED_TOKENS, _PADDING = 4096, 2  # prompts are padded up to so many tokens, and so many times their unpadded tokens


class PlainSteps:
    """Launches every step, with exact shapes."""

    block = 1
    lag = 0
    shrink_below = 0.9
    smallest = 1

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def rounded(self, count: int) -> int:
        """Return the size of a grid for `count` groups or members."""
        return count

    def rounded_length(self, tokens: int) -> int:
        """Return the columns of a grid for prompts or completions of up to `tokens`."""
        return tokens

    def begin(self, prompts: Prompts, uniform_BN: Tensor, prefill_tokens: int) -> None:
        """Prefill an opened grid with the prompts, and sample the tokens of the first column."""
        self._decoder.load(prompts, uniform_BN)
        self._decoder.prefill(prompts, prefill_tokens)

    def advance(self, column: int) -> None:
        """Sample the tokens of a column, those before it being there."""
        self._decoder.advance(column)

    def read(self, start: int, stop: int) -> PendingTokens:
        """Return a function that gives the tokens and log-probs of some columns."""
        ids_KB, logps_KB = (x[start:stop].numpy().copy() for x in (self._decoder.ids_NB, self._decoder.logps_NB))
        return lambda: (ids_KB, logps_KB)

    def release(self) -> None:
        """Do nothing: no graphs are kept."""


class GraphSteps:
    """Captures steps on a GPU once for each shape, then replays them; the host reads tokens one block later."""

    # Sizes and lengths of grids take few values, so that graphs are reused over calls and training steps. Graphs read
    # weights at their addresses: weights changed in place need no new graph, and moved weights or switched adapters are
    # detected at the next call.

    block = _BLOCK
    lag = 1
    shrink_below = 0.5
    smallest = 32  # slots; a step with fewer takes as long

    def __init__(self, decoder: Decoder, compiled: bool) -> None:
        self._decoder = decoder
        self._graphs: OrderedDict[Any, torch.cuda.CUDAGraph] = OrderedDict()
        self._recorded: Any = None
        self._pool: Any = None
        self._capturable = {"prefill", "step"}
        self._layers: dict[str, dict[nn.Module, Callable[..., Any]]] = {}
        self._compiled = compiled
        if compiled:
            decoder.draw = torch.compile(decoder.draw)

    def rounded(self, count: int) -> int:
        """Round up to 1, 2, 3, 4, 6, 8, 12, 16, ...: at most by half."""
        power = 1 << max(0, count - 1).bit_length()
        return power if count > power * 3 // 4 or power < 4 else power * 3 // 4

    def rounded_length(self, tokens: int) -> int:
        return bucketed(tokens)

    def begin(self, prompts: Prompts, uniform_BN: Tensor, prefill_tokens: int) -> None:
        """Prefill an opened grid with the prompts, and sample the tokens of the first column."""
        # Few prompts take the GPU less time than launching each kernel takes the host: they are padded to the grid's
        # length, so that a graph can be replayed. Graphs are dropped first where weights or buffers have moved.
        decoder = self._decoder
        recorded = [decoder.arena.moved, *_weight_addresses(decoder.base)]
        if recorded != self._recorded:
            self.release()
            self._recorded = recorded
        decoder.load(prompts, uniform_BN)
        padded = decoder.grid.groups * decoder.grid.prompt_length
        few = padded <= min(_PADDED_TOKENS, prefill_tokens, _PADDING * sum(map(len, prompts)))
        if not few or "prefill" not in self._capturable:
            self._through_compiler("prefill", lambda: decoder.prefill(prompts, prefill_tokens))
            return
        decoder.pad(prompts)
        self._replay("prefill", decoder.prefill_padded)

    def advance(self, column: int) -> None:
        self._replay("step", lambda: self._decoder.advance(self._decoder.grid.completion_length))

    def _replay(self, name: str, work: Callable[[], None]) -> None:
        """Replay the graph of some work of the grid; the first time, run it and capture the graph."""
        key = (name, self._decoder.grid, self._decoder.sampling)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            self._graphs[key].replay()
            return
        self._through_compiler(name, work)  # which also warms kernels up
        if name in self._capturable:
            with self._fused_layers(name):
                self._capture(key, work)

    def _through_compiler(self, name: str, work: Callable[[], None]) -> None:
        """Run some work with compiled layers, or with eager ones where the compiler fails."""
        step_1 = self._decoder.step_1.clone()
        try:
            # A number that may change would become a tensor on the CPU, for which a C++ compiler is started.
            with dynamo_config.patch(specialize_float=True), self._fused_layers(name):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._compiled:
                raise
            warn_once(
                f"the layers of {type(self._decoder.base).__name__} cannot be compiled, so sampling is slower: "
                f"{str(error).splitlines()[0]} (`trl.compile_sampler: false` leaves it out)"
            )
            self._compiled, self._decoder.draw = False, draw
            self._decoder.step_1.copy_(step_1)
            work()

    def _fused_layers(self, name: str) -> AbstractContextManager[None]:
        """Use compiled layers inside, if `compiled` is set; all layers of a class share one compiled forward."""
        if name not in self._layers and self._compiled:
            self._layers[name] = _compiled_layers(self._decoder, name)
        return replaced_forwards(self._layers[name] if self._compiled else {})

    def _capture(self, key: Any, work: Callable[[], None]) -> None:
        """Capture some work as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # other threads may go on using the GPU meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            # Also when memory runs out: without a graph this work fitted just now, and a graph needs further memory.
            self._capturable.discard(key[0])
            warn_once(
                f"the {key[0]} of {type(self._decoder.base).__name__} cannot be recorded as a CUDA graph, so it "
                f"launches every kernel each time: {str(error).splitlines()[0]}"
            )
            return
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def read(self, start: int, stop: int) -> PendingTokens:
        """Copy the tokens and log-probs of some columns to the host, while further steps are launched."""
        values = [x[start:stop] for x in (self._decoder.ids_NB, self._decoder.logps_NB)]
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in values]
        event = torch.cuda.Event()
        event.record()

        def pending() -> tuple[NDArray[np.int64], NDArray[np.float32]]:
            event.synchronize()
            return copies[0].numpy(), copies[1].numpy()

        return pending

    def release(self) -> None:
        """Drop all graphs and their memory: a pool that no graph uses any more cannot be captured into."""
        self._graphs.clear()
        self._pool = None


def _compiled_layers(decoder: Decoder, name: str) -> dict[nn.Module, Callable[..., Any]]:
    """Return the layers around each attention with the compiled forward of their class, for prompts of any length."""
    modules = dict(decoder.base.named_modules())
    # A compiler may reorder the calls that a module makes in one layer, and calls are identified by their order.
    calls = Counter(layer.module for layer in decoder.layers)
    around = [modules[path.rpartition(".")[0]] for path, module in modules.items() if calls[module] == 1]
    plain = [layer for layer in around if "forward" not in vars(layer)]
    forwards = {
        kind: torch.compile(_with_name(kind.forward, name), dynamic=True if name == "prefill" else None)
        for kind in {type(layer) for layer in plain}
    }
    return {layer: forwards[type(layer)] for layer in plain}


def _with_name(function: Any, name: str) -> Callable[..., Any]:
    """Rename a function, because the compiler reuses guards of functions of the same name and place."""
    code = function.__code__.replace(co_name=name)
    copied = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _weight_addresses(base: nn.Module) -> list[Any]:
    """Return the address that a forward reads each weight from, and the adapters that it applies."""
    addresses: list[Any] = []
    module: Any
    for module in every_module(base):
        values = vars(module)
        weights = [(name, weight) for name, weight in values["_parameters"].items() if weight is not None]
        addresses += [values.get(name, weight).data_ptr() for name, weight in weights]
        if _is_adapter(type(module)):
            addresses.append((module.disable_adapters, tuple(module.active_adapters), tuple(module.merged_adapters)))
    return addresses


@cache  # an uncached `isinstance` of an abstract class takes longer than the rest of the walk
def _is_adapter(kind: type) -> bool:
    return issubclass(kind, BaseTunerLayer)
