"""Launch the steps of slots one by one, or replay them as CUDA graphs."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config

from upweight.log import warn_once
from upweight.models.kernels.launch import only_compiling
from upweight.models.modules import every_module, replaced_forwards
from upweight.sampler.draw import draw
from upweight.sampler.forward import CachedForward
from upweight.sampler.fused_decoder import fused_decoder
from upweight.sampler.slots import Prefix, Slots

# Waits for tokens, their log-probs, and where they are recorded the experts of the tokens that drew them.
StepTokens = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int16] | None]
PendingTokens = Callable[[], StepTokens]

_MOST_GRAPHS = 64
_PROMPT_ROWS = (16, 64, 320, 2048)  # numbers of tokens that take different kernels


class SlotSteps(Protocol):
    """How the work of slots is launched."""

    slots: Slots
    lag: int  # blocks of steps that are launched before the tokens of an earlier one are read
    compile_seconds: float

    def begin(self, addresses: list[Any]) -> None:
        """Prepare a call with weights at these addresses."""

    def compile_ahead(self, sizes: Sequence[int]) -> None:
        """Compile what steps of these sizes need, where that is faster than one by one; slots have no sequences."""

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Prefill pages."""

    def run(self, count: int) -> PendingTokens:
        """Launch steps; return a function that waits for their tokens and log-probs, [count, slots]."""
        ...

    def release(self) -> None:
        """Free what is kept over calls."""


class EagerSteps:
    """Launches every kernel each time, and waits for it."""

    lag, compile_seconds = 0, 0.0

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def begin(self, addresses: list[Any]) -> None:
        """Do nothing: nothing is kept."""

    def compile_ahead(self, sizes: Sequence[int]) -> None:
        """Do nothing: nothing is compiled."""

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        self.slots.prefill(prefixes)

    def run(self, count: int) -> PendingTokens:
        self.slots.column_1.zero_()
        for _ in range(count):
            self.slots.step()
        values = [x.cpu().numpy().copy() for x in _of_steps(self.slots, count)]
        return lambda: (values[0], values[1], values[2] if len(values) > 2 else None)

    def release(self) -> None:
        """Do nothing: nothing is kept."""


class GraphSteps:
    """Captures the step of each number of slots once, then replays it; the host reads tokens one block later."""

    # Graphs read weights at their addresses: weights changed in place need no new graph, and moved weights or switched
    # adapters are detected at the next call.

    lag = 1

    def __init__(self, slots: Slots, compiled: bool) -> None:
        self.slots = slots
        self.compile_seconds = 0.0  # spent on what has run for the first time: compiling, checking, recording
        self._graphs: OrderedDict[Any, torch.cuda.CUDAGraph] = OrderedDict()
        self._recorded: Any = None
        self._pool: Any = None
        self._capturable = True
        self._ahead: set[int] = set()  # sizes whose kernels are compiled
        self._prefilled = False
        self._layers: dict[str, dict[nn.Module, Callable[..., Any]]] = {}
        self._decoder: dict[nn.Module, Callable[..., Any]] | None = None  # not asked for yet
        self._compiled = compiled
        if compiled:
            slots.draw = torch.compile(slots.draw)

    def begin(self, addresses: list[Any]) -> None:
        """Drop all graphs where weights or buffers have moved."""
        recorded = [self.slots.arena.moved, *addresses]
        if recorded != self._recorded:
            self.release()
            self._recorded = recorded

    def compile_ahead(self, sizes: Sequence[int]) -> None:
        """Compile the kernels of steps of these sizes, and of prompts, at the same time; nothing of it runs.

        Slots must be without sequences.
        """
        new = [size for size in sizes if size not in self._ahead]
        if not new or self.slots.device.type != "cuda":
            return

        def work() -> None:
            if not self._compiled or not self._decoder:
                return
            with only_compiling() as able:
                for size in new if able else ():
                    self.slots.size = size
                    self.slots.column_1.zero_()
                    self.slots.step()
                for rows in _PROMPT_ROWS if able and not self._ahead else ():
                    self.slots.forward_nothing(rows)

        with self._counted():
            self._through_compiler("step", work)
        self._ahead.update(new)

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        first, self._prefilled = not self._prefilled, True
        with self._counted() if first else nullcontext():
            self._through_compiler("prefill", lambda: self.slots.prefill(prefixes))

    def run(self, count: int) -> PendingTokens:
        """Launch steps, and the copy of their tokens to the host, which further work need not wait for."""
        self.slots.column_1.zero_()
        for _ in range(count):
            self._step()
        values = _of_steps(self.slots, count)
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in values]
        event = torch.cuda.Event()
        event.record()

        def pending() -> StepTokens:
            event.synchronize()
            return copies[0].numpy(), copies[1].numpy(), copies[2].numpy() if len(copies) > 2 else None

        return pending

    def _step(self) -> None:
        """Replay the graph of a step; the first time, run the step and capture the graph."""
        key = (self.slots.size, self.slots.sampling)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            self._graphs[key].replay()
            return
        if not self._capturable:
            self._through_compiler("step", self.slots.step)
            return
        with self._counted():
            self._through_compiler("step", self.slots.step)  # which also warms kernels up
            with self._fused_layers("step"):
                self._capture(key)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Add the time inside to `compile_seconds`, less that of the work which waited before."""
        wait = torch.cuda.synchronize if self.slots.device.type == "cuda" else lambda: None
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.compile_seconds += time.perf_counter() - began

    def _through_compiler(self, name: str, work: Callable[[], None]) -> None:
        """Run some work with compiled layers, or with eager ones where the compiler fails."""
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
                f"the layers of {type(self.slots.forward.base).__name__} cannot be compiled, so sampling is slower: "
                f"{str(error).splitlines()[0]} (`trl.compile_sampler: false` leaves it out)"
            )
            self._compiled, self.slots.draw = False, draw
            work()

    def _fused_layers(self, name: str) -> AbstractContextManager[None]:
        """Use fused layers inside, if `compiled` is set: by our kernels, else by the compiler, once a class."""
        if name not in self._layers and self._compiled:
            forward = self.slots.forward
            if self._decoder is None:
                self._decoder = fused_decoder(forward) if _in_half_precision(forward) else {}
            self._layers[name] = self._decoder or _compiled_layers(forward, name)
        return replaced_forwards(self._layers[name] if self._compiled else {})

    def _capture(self, key: Any) -> None:
        """Capture a step as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # other threads may go on using the GPU meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.slots.step()
        except RuntimeError as error:
            # Also when memory runs out: without a graph this work fitted just now, and a graph needs further memory.
            self._capturable = False
            warn_once(
                f"the steps of {type(self.slots.forward.base).__name__} cannot be recorded as a CUDA graph, so they "
                f"launch every kernel each time: {str(error).splitlines()[0]}"
            )
            return
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def release(self) -> None:
        """Drop all graphs and their memory: a pool that no graph uses any more cannot be captured into."""
        self._graphs.clear()
        self._pool = None


def _of_steps(slots: Slots, count: int) -> list[Tensor]:
    """Return what so many steps wrote for the host."""
    written = [slots.ids_KB, slots.logps_KB, *([] if slots.routes_KBLA is None else [slots.routes_KBLA])]
    return [values_KB[:count, : slots.size] for values_KB in written]


def _in_half_precision(forward: CachedForward) -> bool:
    """Return whether a model is sampled on a GPU in half precision: in float32 nothing is rounded otherwise."""
    return forward.device.type == "cuda" and all(layer.dtype != torch.float32 for layer in forward.layers)


def _compiled_layers(forward: CachedForward, name: str) -> dict[nn.Module, Callable[..., Any]]:
    """Return the layers around each attention with the compiled forward of their class, for any number of tokens."""
    modules = dict(forward.base.named_modules())
    # A compiler may reorder the calls that a module makes in one layer, and calls are identified by their order.
    calls = Counter(layer.module for layer in forward.layers)
    around = [modules[path.rpartition(".")[0]] for path, module in modules.items() if calls[module] == 1]
    plain = [layer for layer in around if "forward" not in vars(layer)]
    forwards = {
        kind: torch.compile(_with_name(kind.forward, name), dynamic=True) for kind in {type(layer) for layer in plain}
    }
    return {layer: forwards[type(layer)] for layer in plain}


def _with_name(function: Any, name: str) -> Callable[..., Any]:
    """Rename a function, because the compiler reuses guards of functions of the same name and place."""
    code = function.__code__.replace(co_name=name)
    copied = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def weight_state(base: nn.Module) -> tuple[list[Any], int]:
    """Return the addresses of the weights that a forward reads with the adapters it applies, and a count of changes."""
    addresses: list[Any] = []
    changes = 0
    module: Any
    for module in every_module(base):
        values = vars(module)
        for name, weight in values["_parameters"].items():
            if weight is not None:
                weight_read = values.get(name, weight)
                addresses.append(weight_read.data_ptr())
                changes += weight_read._version
        if _is_adapter(type(module)):
            addresses.append((module.disable_adapters, tuple(module.active_adapters), tuple(module.merged_adapters)))
    return addresses, changes


@cache  # an uncached `isinstance` of an abstract class takes longer than the rest of the walk
def _is_adapter(kind: type) -> bool:
    return issubclass(kind, BaseTunerLayer)
