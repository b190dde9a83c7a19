"""The experts of a layer as grouped products, with fewer passes over pairs of token and expert than in transformers.

There are as many pairs as tokens times the experts of a token, so each pass over their rows costs. Gradients are
gathered by the inverse order and summed, not added one by one (`index_put`), and the weight of an expert is multiplied
with the gate, where rows are narrow, before the second product.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations import moe

from upweight.log import warn_once
from upweight.models.kernels.packed_product import is_packed, packed_product
from upweight.models.modules import wrap_forward

if torch.cuda.is_available() and find_spec("triton"):
    from upweight.models.kernels.experts import passes
else:
    passes = None  # without Triton, each pass is several operators of torch

_grouped_mm = getattr(moe, "_grouped_mm", None)  # of transformers: (rows sorted by expert, weights, ends of the groups)
_DEFAULT_GATE = getattr(moe, "_default_apply_gate", None)  # act(gate) * up for the two halves of a row
_SILU = (nn.SiLU, type(ACT2FN["silu"]))
ALIGNED = 16  # bytes that a row of a grouped product's operand is a multiple of
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
UNUSUAL = ("has_post_expert_norm", "_is_expert_parallel")  # which experts of older transformers cannot be
_FLAGS = ("has_gate", "has_bias", "is_transposed", "num_experts")  # by which transformers describes what it can group


class LowRank(NamedTuple):
    """The factors of one expert weight's adapter, for x @ down @ up."""

    down_XDR: Tensor
    up_XRD: Tensor
    scaling: float


class Routes(NamedTuple):
    """The pairs of token and expert, sorted by expert."""

    expert_S: Tensor
    order_S: Tensor  # the place of a sorted pair among those of the tokens
    token_S: Tensor
    inverse_S: Tensor  # where a token's pairs lie
    ends_X: Tensor  # of each expert's pairs


def group_experts(model: PreTrainedModel) -> None:
    """Run the experts of a model here, wherever transformers runs them as grouped products."""
    layers: list[Any] = list(filter(is_groupable, model.modules()))
    if any(runs_grouped(experts) and not _is_aligned(experts) for experts in layers):
        problem = f"rows of experts are no multiple of {ALIGNED} bytes, as grouped products need them"
        warn_once(f"{problem}: experts run one after the other, which is slow")
        model.set_experts_implementation("eager")
    for experts in layers:
        wrap_forward(experts, _experts_forward)


def is_groupable(module: Any) -> bool:
    """Return whether a module holds the experts of a layer in the form that grouped products need."""
    described = all(hasattr(module, flag) for flag in _FLAGS) and not any(getattr(module, name, 0) for name in UNUSUAL)
    return _grouped_mm is not None and described and WEIGHTS[-1] in module._parameters


def _is_aligned(experts: Any) -> bool:
    """Return whether the weights of experts, as forwards read them, have rows that grouped products take."""
    weights = [getattr(experts, name, None) for name in WEIGHTS]
    whole = [weight for weight in weights if weight is not None and weight.dim() == 3 and not is_packed(weight)]
    return all(width * weight.element_size() % ALIGNED == 0 for weight in whole for width in weight.shape[1:])


def runs_grouped(experts: Any) -> bool:
    """Return whether transformers runs these experts as grouped products."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"


def _experts_forward(self: nn.Module, hidden_ND: Tensor, *args: Any, **kwargs: Any) -> Any:
    # A compiler fuses the passes of the stock forward itself; PEFT's forward adds adapters by a parametrisation.
    unusual = kwargs or len(args) != 2 or torch.compiler.is_compiling() or getattr(self, "parametrizations", None)
    if unusual or not runs_grouped(self):
        return vars(self)["_stock_forward"](hidden_ND, *args, **kwargs)
    return run_experts(self, {}, hidden_ND, *args)


def run_experts(
    experts: Any, adapters: Mapping[str, LowRank], hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor
) -> Tensor:
    """Return the outputs of experts with the adapters of their weights, summed over those of a token."""
    routes = sorted_routes(index_NK, experts.num_experts)

    def project(x_SD: Tensor, name: str) -> Tensor:
        out_SD = _base_product(x_SD, experts, name, routes.ends_X)
        if name in adapters:
            down_XDR, up_XRD, scaling = adapters[name]
            narrow_SR = grouped_product(x_SD, down_XDR, routes.ends_X) * scaling
            out_SD = out_SD + grouped_product(narrow_SR, up_XRD, routes.ends_X)
        return out_SD + getattr(experts, f"{name}_bias")[routes.expert_S.int()] if experts.has_bias else out_SD

    inner_SF = project(
        _taken_rows(hidden_ND, routes, index_NK.shape[1]), WEIGHTS[0] if experts.has_gate else WEIGHTS[1]
    )
    if _has_plain_gate(experts):
        out_SD = project(_weighted_gate(inner_SF, weight_NK, routes), WEIGHTS[2])
    else:
        inner_SF = experts._apply_gate(inner_SF) if experts.has_gate else experts.act_fn(inner_SF)
        out_SD = project(inner_SF, WEIGHTS[2]) * _sorted_weights(weight_NK, routes)[:, None]
    return _summed_rows(out_SD, routes, index_NK.shape[1]).to(hidden_ND.dtype)


def sorted_routes(index_NK: Tensor, experts: int) -> Routes:
    """Return the pairs of token and expert in the order of experts."""
    short, device = torch.int16, index_NK.device  # a GPU sorts by passes over the bits of a number
    expert_S, order_S = torch.sort(index_NK.reshape(-1).to(short), stable=True)
    number_X = torch.arange(experts, dtype=short, device=device)
    ends_X = torch.searchsorted(expert_S, number_X, right=True, out_int32=True)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=device))
    return Routes(expert_S, order_S, order_S // index_NK.shape[1], inverse_S, ends_X)


def grouped_product(x_SD: Tensor, weight_XDF: Tensor, ends_X: Tensor) -> Tensor:
    """Return the product of each row with the weight of its group."""
    assert _grouped_mm is not None
    return _grouped_mm(x_SD, weight_XDF, ends_X)


def _base_product(x_SD: Tensor, experts: Any, name: str, ends_X: Tensor) -> Tensor:
    """Return the product of rows with one of the weights of experts."""
    weight_X, is_transposed = getattr(experts, name), experts.is_transposed
    if is_packed(weight_X):
        return packed_product(grouped_product, x_SD, weight_X, ends_X, is_transposed=is_transposed)
    if torch.is_grad_enabled() and _kernels(x_SD) is not None:
        master = experts._parameters[name]
        if master is not weight_X and master.requires_grad and x_SD.dtype == weight_X.dtype:
            return _CopiedProduct.apply(x_SD, weight_X.detach(), master, (ends_X, is_transposed))
    return grouped_product(x_SD, _inputs_first(weight_X, is_transposed), ends_X)


def _inputs_first(weight_X: Tensor, is_transposed: bool) -> Tensor:
    return weight_X if is_transposed else weight_X.transpose(-2, -1)


class _CopiedProduct(torch.autograd.Function):
    """The product of rows with the compute copy of a weight, whose gradient goes to the float32 master directly."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, copy_X: Tensor, master_X: Tensor, groups: tuple[Tensor, bool]) -> Tensor:
        """`groups`: where the rows of each expert end, and whether weights have their inputs before their outputs."""
        ends_X, is_transposed = groups
        ctx.save_for_backward(x_SD, copy_X, ends_X)
        ctx.is_transposed = is_transposed
        return grouped_product(x_SD, _inputs_first(copy_X, is_transposed), ends_X)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_SD, copy_X, ends_X = ctx.saved_tensors
        grad_SF = grads[0].contiguous()
        on_x = on_master = None
        if ctx.needs_input_grad[0]:
            on_x = grouped_product(grad_SF, _inputs_first(copy_X, not ctx.is_transposed), ends_X)
        if ctx.needs_input_grad[2]:
            sides = (x_SD, grad_SF) if ctx.is_transposed else (grad_SF, x_SD)
            on_master = _kernels(x_SD).weight_gradient(*sides, ends_X)
        return on_x, None, on_master, None


def _has_plain_gate(experts: Any) -> bool:
    """Return whether rows are silu(gate) * up and nothing is added to them, so that weights may come before it."""
    default = experts.has_gate and getattr(type(experts), "_apply_gate", None) is _DEFAULT_GATE is not None
    return default and isinstance(experts.act_fn, _SILU) and not experts.has_bias


def _taken_rows(hidden_ND: Tensor, routes: Routes, top_k: int) -> Tensor:
    """Return the hidden states of each pair."""
    if _is_plain():
        return hidden_ND.index_select(0, routes.token_S)
    return _TakenRows.apply(hidden_ND, routes.token_S, routes.inverse_S, top_k)


def _summed_rows(out_SD: Tensor, routes: Routes, top_k: int) -> Tensor:
    """Return the sum of each token's pairs."""
    if _is_plain():
        return _sum_by_token(out_SD, routes.inverse_S, top_k)
    return _SummedRows.apply(out_SD, routes.token_S, routes.inverse_S, top_k)


def _sorted_weights(weight_NK: Tensor, routes: Routes) -> Tensor:
    """Return the weight of each pair."""
    flat_S = weight_NK.reshape(-1, 1)
    if _is_plain():
        return flat_S.index_select(0, routes.order_S)[:, 0]
    return _TakenRows.apply(flat_S, routes.order_S, routes.inverse_S, 1)[:, 0]


def _weighted_gate(both_SF: Tensor, weight_NK: Tensor, routes: Routes) -> Tensor:
    """Return silu(gate) * up * weight for rows of gate and up."""
    weight_S = _sorted_weights(weight_NK, routes)
    if _is_plain():
        return _gate(both_SF, weight_S)
    return _WeightedGate.apply(both_SF, weight_S)


def _is_plain() -> bool:
    """Return whether no backward of ours is needed, or a compiler writes it."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


def _kernels(values: Tensor) -> Any:
    """Return our kernels for passes over these rows; None where torch's operators have to do them."""
    if passes is None or not values.is_cuda or values.dtype == torch.float64:
        return None
    # Kernels are loaded as they first run, which is not allowed while a graph is captured.
    return None if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing() else passes


def _sum_by_token(row_SD: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
    if (kernels := _kernels(row_SD)) is not None:
        return kernels.sum_by_token(row_SD.contiguous(), inverse_S, top_k)
    return row_SD.index_select(0, inverse_S).view(-1, top_k, row_SD.shape[1]).sum(1)


class _TakenRows(torch.autograd.Function):
    """Rows by number, where each is taken `top_k` times; `inverse_S` says where."""

    @staticmethod
    def forward(ctx: Any, row_ND: Tensor, number_S: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_S)
        ctx.top_k = top_k
        return row_ND.index_select(0, number_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse_S,) = ctx.saved_tensors
        return _sum_by_token(grads[0], inverse_S, ctx.top_k), None, None, None


class _SummedRows(torch.autograd.Function):
    """The sum of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, row_SD: Tensor, token_S: Tensor, inverse_S: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(token_S)
        return _sum_by_token(row_SD, inverse_S, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None, None


class _WeightedGate(torch.autograd.Function):
    """silu(gate) * up * weight, which keeps only its inputs for backward."""

    @staticmethod
    def forward(ctx: Any, both_SF: Tensor, weight_S: Tensor) -> Tensor:
        ctx.save_for_backward(both_SF, weight_S)
        return _gate(both_SF, weight_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _gate_gradients(grads[0], *ctx.saved_tensors)


def _gate(both_SF: Tensor, weight_S: Tensor) -> Tensor:
    if (kernels := _kernels(both_SF)) is not None:
        return kernels.weighted_gate(both_SF.contiguous(), weight_S.contiguous())
    gate, up = _wide(both_SF).chunk(2, -1)
    return (F.silu(gate) * up * weight_S[:, None]).to(both_SF.dtype)


def _gate_gradients(grad_SF: Tensor, both_SF: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor]:
    if (kernels := _kernels(both_SF)) is not None:
        return kernels.gate_gradients(grad_SF.contiguous(), both_SF.contiguous(), weight_S.contiguous())
    gate, up = _wide(both_SF).chunk(2, -1)
    share, grad = torch.sigmoid(gate), _wide(grad_SF)
    silu = gate * share
    on_weight_S = (grad * silu * up).sum(-1)
    grad = grad * weight_S[:, None]
    on_gate = grad * up * (share * (1 + gate * (1 - share)))
    return torch.cat([on_gate, grad * silu], -1).to(both_SF.dtype), on_weight_S.to(weight_S.dtype)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
