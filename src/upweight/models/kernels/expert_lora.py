"""LoRA on the fused experts of a layer as grouped products; PEFT adds the adapter to a copy of all of its experts.

Experts that are packed in 4 bits run here too, with adapters or without.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.integrations import moe

from upweight.errors import UserError
from upweight.models.kernels.packed_product import has_packed_experts, is_packed, packed_product
from upweight.models.modules import wrap_forward

_grouped_mm = getattr(moe, "_grouped_mm", None)  # of transformers: (rows sorted by expert, weights, ends of the groups)
ALIGNED = 16  # bytes that a row of a grouped product's operand is a multiple of
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
UNUSUAL = ("has_post_expert_norm", "_is_expert_parallel")  # which experts of older transformers cannot be


class LowRank(NamedTuple):
    """The factors of one expert weight's adapter, for x @ down @ up."""

    down_XDR: Tensor
    up_XRD: Tensor
    scaling: float


def add_expert_adapters(model: nn.Module) -> None:
    """Let adapters of fused experts run as grouped products, wherever the layer's experts do."""
    inner = {module.base_layer for module in model.modules() if isinstance(module, ParamWrapper)}
    for module in model.modules():
        if isinstance(module, ParamWrapper) and module not in inner:
            wrap_forward(module, _experts_forward)


def _experts_forward(self: ParamWrapper, hidden_ND: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the output of experts with their adapters; layers that are not plain run PEFT's forward."""
    adapters = _plain_adapters(self, hidden_ND) if len(args) == 2 and not kwargs else None
    if adapters is None:
        return self.__dict__["_stock_forward"](hidden_ND, *args, **kwargs)
    return _run_experts(self.get_base_layer(), adapters, hidden_ND, *args)


def run_packed_experts(self: nn.Module, hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the output of packed experts without adapters; the forward of their module."""
    return _run_experts(self, {}, hidden_ND, index_NK, weight_NK)


def _run_experts(
    experts: Any, adapters: Mapping[str, LowRank], hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor
) -> Tensor:
    tokens, top_k = index_NK.shape
    expert_S, order_S = torch.sort(index_NK.reshape(-1), stable=True)
    numbers_X = torch.arange(experts.num_experts, device=expert_S.device)
    ends_X = torch.searchsorted(expert_S, numbers_X, right=True).int()

    def project(x_SD: Tensor, name: str) -> Tensor:
        out_SD = _base_product(x_SD, getattr(experts, name), ends_X, experts.is_transposed)
        if name in adapters:
            down_XDR, up_XRD, scaling = adapters[name]
            out_SD = out_SD + scaling * _product(_product(x_SD, down_XDR, ends_X), up_XRD, ends_X)
        return out_SD + getattr(experts, f"{name}_bias")[expert_S] if experts.has_bias else out_SD

    inner_SD = project(hidden_ND[order_S // top_k], WEIGHTS[0] if experts.has_gate else WEIGHTS[1])
    inner_SD = experts._apply_gate(inner_SD) if experts.has_gate else experts.act_fn(inner_SD)
    out_SD = project(inner_SD, WEIGHTS[2]) * weight_NK.reshape(-1)[order_S, None]
    back_SD = torch.zeros_like(out_SD).index_copy(0, order_S, out_SD)
    return back_SD.view(tokens, top_k, -1).sum(1).to(hidden_ND.dtype)


def _base_product(x_SD: Tensor, weight_X: Tensor, ends_X: Tensor, is_transposed: bool) -> Tensor:
    if is_packed(weight_X):
        return packed_product(_product, x_SD, weight_X, ends_X, is_transposed=is_transposed)
    return _product(x_SD, weight_X if is_transposed else weight_X.transpose(-2, -1), ends_X)


def _product(x_SD: Tensor, weight_XDF: Tensor, ends_X: Tensor) -> Tensor:
    assert _grouped_mm is not None
    return _grouped_mm(x_SD, weight_XDF, ends_X)


def _plain_adapters(outer: ParamWrapper, hidden_ND: Tensor) -> dict[str, LowRank] | None:
    """Return the factors of a layer's adapters by the weight that they adapt; None where PEFT's forward is needed."""
    experts: Any = outer.get_base_layer()
    packed = has_packed_experts(experts)
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    unusual = any(getattr(experts, name, False) for name in UNUSUAL) or implementation != "grouped_mm"
    if _grouped_mm is None or (unusual and not packed) or getattr(experts, "parametrizations", None):
        return None
    adapters: dict[str, LowRank] = {}
    layer: Any = outer
    while isinstance(layer, ParamWrapper):
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        name, swapped = layer.parameter_name, layer._did_swap_in_out_features
        if packed and not layer.disable_adapters and (len(active) > 1 or name not in WEIGHTS):
            problem = f"{name} with {len(active)} active adapters" if len(active) > 1 else f"an adapter on {name}"
            raise UserError(f"quantize_moe_experts: {problem} does not run on packed experts. Drop the key, or it.")
        if layer.disable_adapters or layer.merged or len(active) != 1 or name not in WEIGHTS:
            return None
        padding = -layer.r[active[0]] % (ALIGNED // hidden_ND.element_size())
        unaligned = padding > 0 and not packed
        if unaligned or layer.num_experts != experts.num_experts or swapped is experts.is_transposed:
            return None
        left, right, scaling = layer.get_delta_factors(active[0])  # in the layout of the weight
        down, up = (right.transpose(-2, -1), left.transpose(-2, -1)) if swapped else (left, right)
        if padding:
            down, up = F.pad(down, (0, padding)), F.pad(up, (0, 0, 0, padding))
        adapters[name] = LowRank(_aligned(down), _aligned(up), scaling)
        layer = layer.base_layer
    return adapters


def _aligned(factor_XDF: Tensor) -> Tensor:
    """Return a factor whose last or last but one axis is dense, as a grouped product needs it."""
    dense = factor_XDF.stride(-1) == 1 or factor_XDF.stride(-2) == 1
    return factor_XDF if dense else factor_XDF.contiguous()
