"""LoRA on the fused experts of a layer as grouped products; PEFT adds the adapter to a copy of all of its experts.

Experts that are packed in 4 bits run here too, with adapters or without.
"""

from typing import Any

import torch.nn.functional as F
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from upweight.errors import UserError
from upweight.models.kernels.experts.grouped import ALIGNED, WEIGHTS, LowRank, is_groupable, run_experts, runs_grouped
from upweight.models.kernels.packed_product import has_packed_experts
from upweight.models.modules import wrap_forward


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
    return run_experts(self.get_base_layer(), adapters, hidden_ND, *args)


def run_packed_experts(self: nn.Module, hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the output of packed experts without adapters; the forward of their module."""
    return run_experts(self, {}, hidden_ND, index_NK, weight_NK)


def _plain_adapters(outer: ParamWrapper, hidden_ND: Tensor) -> dict[str, LowRank] | None:
    """Return the factors of a layer's adapters by the weight that they adapt; None where PEFT's forward is needed."""
    experts: Any = outer.get_base_layer()
    packed = has_packed_experts(experts)
    plain = packed or (is_groupable(experts) and runs_grouped(experts))
    if not plain or getattr(experts, "parametrizations", None):
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
