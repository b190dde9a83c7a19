"""Recomputation of a layer, or of a block in tiles, as one node of the graph.

torch's checkpoint keeps account of every tensor that a layer saves, so that hooks and dropout work in any module. On a
GPU that costs the host as much time as the layer's own launches. Where nothing needs it, the node here saves the input.

Most layers end by adding the output of their gated block to a residual. The backward of a sum reads no values, so where
a layer is recomputed, a block in tiles need not be: each tile is computed once, in the backward of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from upweight.models.modules import context_value, dropout_rates, every_module

Run = Callable[[Tensor], Any]

_leaves_out_tiles: ContextVar[bool] = ContextVar("leaves_out_tiles", default=False)
# Nodes of the graph whose backward reads no values.
_VALUE_FREE = {"AddBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0"}


class OtherOutput(TypeError):
    """A module returned something else than a tensor."""


class Recomputed(torch.autograd.Function):
    """run(x), which backward runs again: on all rows of x, or on one tile of them after the other."""

    @staticmethod
    def forward(ctx: Any, run: Run, tile: int | None, x: Tensor, *weights: Tensor) -> Tensor:
        """`weights`: all that `run` reads and that gets gradients. The output of tiles is shaped as x is."""
        ctx.run, ctx.tile, ctx.weights = run, tile, weights
        ctx.save_for_backward(x)
        if tile is not None and _leaves_out_tiles.get():
            return unread(x)
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


def _gradients(run: Run, x: Tensor, grad: Tensor, weights: tuple[Tensor, ...], wants_x: bool) -> list[Tensor | None]:
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


def unread(like: Tensor) -> Tensor:
    """Return a tensor whose values nothing reads."""
    return torch.empty_like(like)


class _Layer:
    """The call of a layer, which finds out in its first backward whether later ones may leave out tiles."""

    def __init__(self, layer: nn.Module, call: Any, rest: tuple[Any, ...]) -> None:
        self._layer, self._call, self._rest = layer, call, rest

    def __call__(self, x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self._call(x, *self._rest)
        known: bool | None = vars(self._layer).get("_tiles_unread")
        with context_value(_leaves_out_tiles, bool(known)):
            out = self._call(x, *self._rest)
        if known is None and isinstance(out, Tensor):
            vars(self._layer)["_tiles_unread"] = _tiles_unread(out)
        return out


def _tiles_unread(out: Tensor) -> bool | None:
    """Return whether nothing between tiles and a layer's output reads values; None where there are no tiles."""
    nodes: list[tuple[Any, bool]] = [(out.grad_fn, True)]  # with whether all nodes after it are free of values
    seen, tiles, read = set(nodes), set(), set()
    while nodes:
        node, free = nodes.pop()
        if node.name() == "RecomputedBackward":
            (tiles if free else read).add(node)
        free = free and node.name() in _VALUE_FREE
        new = {(before, free) for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return None if not tiles | read else not read


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
        return Recomputed.apply(_Layer(layer, call, rest), None, hidden, *read_weights(layer))
    except OtherOutput:
        vars(layer)["_stock_checkpoint"] = True
        return stock(call, *args)
