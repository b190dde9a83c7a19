"""The experts that routers choose: recorded while completions are sampled, and chosen again in the training forward."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.models.modules import wrap_forward

NOT_RECORDED = -1  # in place of an expert: the router chooses itself
_TOP_K = (torch.topk, Tensor.topk)
_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")  # of PEFT, in paths
_PROBED = 5  # random states that a router is tried on


class _TopK(TorchFunctionMode):
    """Passes each top-k inside to `choose(scores, result)`, and returns what that returns."""

    # The weights of the chosen experts follow from the values of the top-k by each architecture's own code, so another
    # choice needs no formula of ours, and gradients reach the router through those values.

    def __init__(self, choose: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.choose = choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.choose(args[0], result) if func in _TOP_K else result


@dataclass(eq=False)
class _Forced:
    """The choices of one forward: `routes_NLA` are the sampler's, which are used with `forces`."""

    routes_NLA: Tensor
    forces: bool
    differ_LN: dict[int, Tensor] = field(default_factory=dict)  # whether the router by itself chooses otherwise
    used_LN: dict[int, Tensor] = field(default_factory=dict)  # whether the experts that are used are others
    counts: bool = True  # not while layers are recomputed

    def choose(self, layer: int, scores_NX: Tensor, result: Any) -> Any:
        recorded_NA = self.routes_NLA[:, layer].long()
        free_N1 = recorded_NA[:, :1] < 0
        routed_NA = torch.where(free_N1, result.indices, recorded_NA)
        if self.counts:
            differ_N = (result.indices.sort(-1).values != routed_NA.sort(-1).values).any(-1)
            self.differ_LN[layer] = differ_N
            self.used_LN[layer] = torch.zeros_like(differ_N) if self.forces else differ_N
        if not self.forces:
            return result
        return torch.return_types.topk((scores_NX.gather(-1, routed_NA), routed_NA))

    def changes(self) -> Tensor:
        """Return counts: the router's differing choices, tokens with other experts, choices, recorded tokens."""
        known_N = self.routes_NLA[:, 0, 0] >= 0
        differ_LN, used_LN = (
            torch.stack([one[layer] for layer in sorted(one)]) for one in (self.differ_LN, self.used_LN)
        )
        tokens = known_N.sum()
        return torch.stack([differ_LN.sum(), used_LN.any(0).sum(), tokens * len(differ_LN), tokens]).float()


class Routing:
    """The routers of a model: what they choose is recorded, or taken from a record."""

    def __init__(self, top_k: int, decoder_layers: Sequence[int]) -> None:
        """`decoder_layers`: the number of the decoder layer that each router belongs to."""
        self.layers, self.top_k, self.decoder_layers = len(decoder_layers), top_k, tuple(decoder_layers)
        self._choose: Callable[[int, Tensor, Any], Any] | None = None  # None: routers run as they are

    def buffer(self, tokens: int, device: torch.device) -> Tensor:
        """Return room for the experts of so many tokens."""
        return torch.full((tokens, self.layers, self.top_k), NOT_RECORDED, dtype=torch.int16, device=device)

    @contextmanager
    def recording(self, into_NLA: Tensor | None) -> Iterator[None]:
        """Write the experts of the tokens of a forward inside; with None, routers run as they are."""

        def choose(layer: int, scores_NX: Tensor, result: Any) -> Any:
            assert into_NLA is not None
            into_NLA[:, layer] = result.indices.to(into_NLA.dtype)
            return result

        with self._with(None if into_NLA is None else choose):
            yield

    @contextmanager
    def replaying(self, routes_NLA: Tensor | None, forces: bool) -> Iterator[_Forced | None]:
        """Compare the choices of a forward inside with recorded ones, and with `forces` use those.

        With gradients they also hold after it, since its backward may compute layers again: until the next one.
        """
        forced = None if routes_NLA is None else _Forced(routes_NLA, forces)
        before, self._choose = self._choose, None if forced is None else forced.choose
        try:
            yield forced
        finally:
            if forced is not None:
                forced.counts = False
            if not torch.is_grad_enabled():
                self._choose = before

    @contextmanager
    def _with(self, choose: Callable[[int, Tensor, Any], Any] | None) -> Iterator[None]:
        before, self._choose = self._choose, choose
        try:
            yield
        finally:
            self._choose = before

    def forward(self, layer: int, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a router's own forward with the choice that holds now."""
        if self._choose is None:
            return stock(*args, **kwargs)
        with _TopK(partial(self._choose, layer)):
            return stock(*args, **kwargs)


def routing_of(base: nn.Module) -> Routing | None:
    """Return the routing that `install_routing` gave a model."""
    return vars(base).get("_routing")


def install_routing(base: PreTrainedModel) -> Routing:
    """Let the choices of a model's routers be recorded and replayed; raise where they cannot be."""
    if (known := routing_of(base)) is not None:
        return known
    name = type(base).__name__
    routers: dict[str, Any] = {path: module for path, module in base.named_modules() if _is_router(module)}
    paths = list(dict.fromkeys(_WRAPPERS.sub("", path) for path in routers))
    experts = {_WRAPPERS.sub("", path) for path, module in base.named_modules() if _is_experts(module)}
    if not experts:
        raise UserError(f"trl.routing_replay: {name} is no mixture of experts: there are no choices. Leave it out.")
    if len(paths) != len(experts):
        problem = f"the routers of {name} do not choose by one top-k of their own, so their choices are not recorded"
        raise UserError(f"trl.routing_replay: {problem}. Leave it out.")
    sizes = {int(module.top_k) for module in routers.values()}
    if len(sizes) > 1:
        problem = f"the layers of {name} choose different numbers of experts"
        raise UserError(f"trl.routing_replay: {problem}, which are not recorded. Leave it out.")
    routing = vars(base)["_routing"] = Routing(sizes.pop(), [_layer_number(path) for path in paths])
    for path, module in routers.items():
        vars(module)["_routing"] = routing, paths.index(_WRAPPERS.sub("", path))
        wrap_forward(module, _router_forward)
    return routing


def _layer_number(path: str) -> int:
    """Return the number of the decoder layer in a module's path: the first number there."""
    return next(int(part) for part in path.split(".") if part.isdigit())


def _router_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    routing, layer = vars(self)["_routing"]
    return routing.forward(layer, vars(self)["_stock_forward"], *args, **kwargs)


def _is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of all experts of a layer."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return any(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights) and not hasattr(
        module, "base_layer"
    )


@torch.no_grad()
def _is_router(module: Any) -> bool:
    """Return whether a module maps states to (logits, weights, experts) by one top-k, whose choice can be another."""
    top_k, weight = getattr(module, "top_k", None), getattr(module, "weight", None)
    if next(module.children(), None) is not None:  # PEFT's wrappers have the names of what they wrap
        return False
    if not isinstance(top_k, int) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    experts, width = weight.shape
    generator = torch.Generator().manual_seed(0)
    states_ND = torch.randn(_PROBED, width, generator=generator).to(weight.device, weight.dtype)
    other_NA = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(_PROBED)])
    calls: list[Tensor] = []

    def choose(scores: Tensor, result: Any) -> Any:
        calls.append(result.indices)
        ids = other_NA.to(scores.device)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    try:
        _, plain_weights, experts_NA = module(states_ND)
        with _TopK(choose):
            _, weights, forced = module(states_ND)
    except (TypeError, ValueError, RuntimeError):
        return False
    one = len(calls) == 1 and torch.equal(calls[0], experts_NA)
    return one and torch.equal(forced.cpu(), other_NA) and weights.shape == plain_weights.shape == experts_NA.shape
