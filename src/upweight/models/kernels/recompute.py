"""Recomputation of a layer, or of a block in tiles, as one node of the graph.

torch's checkpoint keeps account of every tensor that a layer saves, so that hooks and dropout work in any module. On a
GPU that costs the host as much time as the layer's own launches. Where nothing needs it, the node here saves the input.

A recomputation is for what backward reads, and the backward of a sum reads no values. So where the last thing that a
layer does is to add an output to a residual, that output need not be computed again: a block in tiles, which runs once
in the backward of its own, or the last product of a block. The graph of the first recomputation shows which these are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from upweight.models.modules import context_value, dropout_rates, every_module

# Of the recomputation under way: modules whose output nothing reads, and the outputs of modules that may be such.
_unread: ContextVar[frozenset[nn.Module]] = ContextVar("unread", default=frozenset())
_outputs: ContextVar[list[tuple[nn.Module, Any]] | None] = ContextVar("outputs", default=None)
# Nodes of the graph whose backward reads no values.
_VALUE_FREE = {"AddBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"}


class OtherOutput(TypeError):
    """A module returned something else than a tensor."""


class Recomputed(torch.autograd.Function):
    """run(x), which backward runs again: on all rows of x, or on one tile of them after the other."""

    @staticmethod
    def forward(ctx: Any, run: "Rerun", tile: int | None, x: Tensor, *weights: Tensor) -> Tensor:
        """`weights`: all that `run` reads and that gets gradients. The output of a block in tiles is shaped as x is."""
        ctx.run, ctx.tile, ctx.weights = run, tile, weights
        ctx.save_for_backward(x)
        if tile is not None and is_unread(run.module):
            return empty(x.shape, x)
        outputs = [run(part) for part in _parts(x, tile)]
        if not all(isinstance(out, Tensor) for out in outputs):
            raise OtherOutput(f"expected a tensor, got {type(outputs[0]).__name__}")
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        (x,), (grad,), tile = ctx.saved_tensors, grad_outputs, ctx.tile
        wants_x = ctx.needs_input_grad[2]
        if tile is None:
            return None, None, *_gradients(ctx.run, x, grad, ctx.weights, wants_x)
        on_x = torch.empty_like(x) if wants_x else None
        totals: list[Tensor | None] = [None] * len(ctx.weights)
        for start in range(0, len(x), tile):
            part = slice(start, start + tile)
            of_part, *on_weights = _gradients(ctx.run, x[part], grad[part], ctx.weights, wants_x)
            if on_x is not None:
                on_x[part] = 0 if of_part is None else of_part
            totals = list(map(_sum, totals, on_weights))
        return (
            None,
            None,
            on_x,
            *(None if one is None else one.to(w.dtype) for one, w in zip(totals, ctx.weights, strict=True)),
        )


def _parts(x: Tensor, tile: int | None) -> tuple[Tensor, ...]:
    return (x,) if tile is None else x.split(tile)


def _gradients(
    run: "Rerun", x: Tensor, grad: Tensor, weights: tuple[Tensor, ...], wants_x: bool
) -> list[Tensor | None]:
    """Return the gradients of x, if it wants one, and of the weights."""
    inner = x.detach().requires_grad_(wants_x)
    with torch.enable_grad():
        out = run(inner)
    gradients = torch.autograd.grad(out, ((inner,) if wants_x else ()) + weights, grad, allow_unused=True)
    return [*([] if wants_x else [None]), *gradients]


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add in float32: the gradient of a weight is a sum over many tiles."""
    if gradient is None:
        return total
    return gradient.float() if total is None else total.add_(gradient)


def read_weights(module: nn.Module) -> list[Tensor]:
    """Return what a module's forward reads and what gets gradients: parameters, or their copies in another dtype."""
    pairs = [
        (parameter, vars(one).get(name, parameter))
        for one in every_module(module)
        for name, parameter in one._parameters.items()
    ]
    weights = {id(read): read for parameter, read in pairs if parameter is not None and read.requires_grad}
    return list(weights.values())


def draws(module: nn.Module) -> bool:
    """Return whether a module in training draws random numbers, which a recomputation would have to repeat."""
    return any(rate > 0 for _, _, rate in dropout_rates(module))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and inside their lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class Rerun:
    """A module's call, which leaves out what nothing reads where it is run again for its backward."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], *rest: Any) -> None:
        self.module, self._call, self._rest = module, call, rest
        self._of = vars(module).setdefault("_unread_outputs", _Unread())

    def __call__(self, x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self._call(x, *self._rest)
        outputs: list[tuple[nn.Module, Any]] = []
        with context_value(_unread, frozenset(self._of.modules)), context_value(_outputs, outputs):
            out = self._call(x, *self._rest)
        if isinstance(out, Tensor):
            self._of.learn(out, outputs)
        return out


class _Unread:
    """The modules inside of a layer or block whose output nothing reads, as far as they have been seen."""

    def __init__(self) -> None:
        self.modules: set[nn.Module] = set()
        self._seen: set[nn.Module] = set()

    def learn(self, out: Tensor, outputs: list[tuple[nn.Module, Any]]) -> None:
        """Look at modules that were not seen before; an output is unread if only sums and views lie after it."""
        new = {node: module for module, node in outputs if module not in self._seen}
        if not new:
            return
        reached = _reached(out)
        read = {module for node, module in new.items() if (node, True) not in reached or (node, False) in reached}
        self.modules |= set(new.values()) - read
        self._seen |= set(new.values())


def _reached(out: Tensor) -> set[tuple[Any, bool]]:
    """Return the nodes of an output's graph, each with whether all nodes on a way to it read no values."""
    nodes: list[tuple[Any, bool]] = [(out.grad_fn, True)]
    reached = set(nodes)
    while nodes:
        node, free = nodes.pop()
        free = free and node.name() in _VALUE_FREE
        new = {(before, free) for before, _ in node.next_functions if before is not None} - reached
        reached |= new
        nodes += new
    return reached


def is_unread(module: nn.Module) -> bool:
    """Return whether nothing reads what a module will return in the recomputation under way."""
    return module in _unread.get()


def note_output(module: nn.Module, out: Tensor) -> None:
    """Say what a module that can leave out its output has returned, in case of a recomputation."""
    if (outputs := _outputs.get()) is not None and out.grad_fn is not None:
        outputs.append((module, out.grad_fn))


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor whose values nothing reads."""
    return like.new_empty(shape)


def recompute_layer(layer: nn.Module, stock: Callable[..., Any], call: Any, *args: Any) -> Any:
    """Run a layer that backward recomputes as one node; where that would not do, by the `stock` checkpoint.

    `call`: the layer's call as a partial function that has its keyword arguments; `args`: the positional ones.
    """
    if not torch.is_grad_enabled():
        return call(*args)
    hidden, rest = args[0] if args else None, args[1:]
    others = (*rest, *getattr(call, "keywords", {}).values())
    mixed = isinstance(hidden, Tensor) and torch.is_autocast_enabled(hidden.device.type)
    alone = isinstance(hidden, Tensor) and not any(one.requires_grad for one in tensors_in(others))
    if not alone or mixed or vars(layer).get("_stock_checkpoint"):
        return stock(call, *args)
    try:
        # What is called must not hold the input, which may wait in host memory.
        return Recomputed.apply(Rerun(layer, call, *rest), None, hidden, *read_weights(layer))
    except OtherOutput:
        vars(layer)["_stock_checkpoint"] = True
        return stock(call, *args)
