"""The routed experts of a mixture in 4 bits: quantised one weight at a time while a model is loaded.

transformers quantises linear layers, and the experts of a layer are one weight. Imported only where
`quantize_moe_experts` asks for it, since bitsandbytes is optional.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from upweight.errors import UserError
from upweight.models.kernels.experts.grouped import UNUSUAL, WEIGHTS
from upweight.models.kernels.experts.lora import run_packed_experts
from upweight.models.kernels.packed_product import has_packed_experts, is_packed, unpacked
from upweight.models.modules import wrap_forward

_Params4bit: Any = importlib.import_module("bitsandbytes").nn.Params4bit
_METHOD = "bitsandbytes_4bit"
_TRIED_ROWS, _LARGEST_DIFFERENCE = 16, 0.05  # as a share of the mean size of outputs: other formulas differ by 1
_FLAGS = ("has_gate", "has_bias", "is_transposed")  # by which transformers describes experts that it can group


class PackedWeight(_Params4bit):
    """The packed bytes of one expert weight; PEFT reads from its shape and dtype how large an adapter is."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the weight, not that of its bytes."""
        state = vars(self).get("quant_state")
        return torch.Size(state.shape) if state is not None else super().shape


@contextmanager
def packing_experts() -> Iterator[None]:
    """Let `from_pretrained` with `load_in_4bit` quantise the experts of mixtures too."""
    stock = AUTO_QUANTIZER_MAPPING[_METHOD]
    AUTO_QUANTIZER_MAPPING[_METHOD] = _ExpertQuantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[_METHOD] = stock


class _ExpertQuantizer(Bnb4BitHfQuantizer):
    """transformers' quantizer for expert weights also, which bounds the bytes that are not yet packed by one weight."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return super().param_needs_quantization(model, param_name, **kwargs) or self.packs(model, param_name)

    def packs(self, model: PreTrainedModel, name: str) -> bool:
        """Return whether a parameter is a weight of experts that is to be packed."""
        module, last = get_module_from_name(model, name)
        return last in WEIGHTS and _has_experts(module) and should_convert_module(name, self.modules_to_not_convert)

    def get_quantize_ops(self) -> Any:
        return _PackWeights(self)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, device_map: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        experts = [module for module in model.modules() if _has_experts(module)]
        if not experts:
            problem = f"{type(model).__name__} has no experts that are one weight for a layer"
            raise UserError(f"quantize_moe_experts: {problem}. Drop the key.")
        for module in experts:
            if not all(hasattr(module, flag) for flag in _FLAGS) or any(getattr(module, name, 0) for name in UNUSUAL):
                raise UserError(_refusal(module, model))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        tried: set[type[nn.Module]] = set()
        for module in [module for module in model.modules() if has_packed_experts(module) and _has_experts(module)]:
            if type(module) not in tried:
                _check_forward(module, model)
                tried.add(type(module))
            wrap_forward(module, run_packed_experts)
        return super()._process_model_after_weight_loading(model, **kwargs)


class _PackWeights(Bnb4bitQuantize):
    """Packs one weight when all of it is read."""

    def convert(self, input_dict: dict[str, Any], *args: Any, model: Any = None, **kwargs: Any) -> dict[str, Any]:
        settings, packed = self.hf_quantizer.quantization_config, {}
        for name in [name for name in input_dict if self.hf_quantizer.packs(model, name)]:
            value = input_dict.pop(name)
            value = value[0] if isinstance(value, list) else value
            packed[name] = PackedWeight(
                value,
                quant_type=settings.bnb_4bit_quant_type,
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_storage=value.dtype,  # PEFT computes adapters in the dtype of the weight that they are for
            ).to(value.device)
        return packed | (super().convert(input_dict, *args, model=model, **kwargs) if input_dict else {})


@torch.no_grad()
def _check_forward(module: Any, model: PreTrainedModel) -> None:
    """Raise where packed experts and the module's forward with their weights differ on random numbers."""
    weights = {name: unpacked(weight) for name, weight in module._parameters.items() if is_packed(weight)}
    first, generator = next(iter(weights.values())), torch.Generator().manual_seed(0)
    into = next(weights[name] for name in WEIGHTS if name in weights)
    width = into.shape[1 if module.is_transposed else 2]
    x_ND = torch.randn(_TRIED_ROWS, width, generator=generator).to(first)
    score_NX = torch.rand(_TRIED_ROWS, len(first), generator=generator).to(first.device)
    chosen = score_NX.topk(min(2, len(first)))
    routes = x_ND, chosen.indices, chosen.values.to(first.dtype)
    try:
        ours_ND = run_packed_experts(module, *routes)
        vars(module).update(weights)  # which Python looks up before the registered parameters
        stock_ND = module(*routes)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{_refusal(module, model)} ({str(error).splitlines()[0]})") from error
    finally:
        for name in weights:
            vars(module).pop(name, None)
    if not (ours_ND - stock_ND).abs().mean() <= _LARGEST_DIFFERENCE * stock_ND.abs().mean():
        raise UserError(_refusal(module, model))


def _refusal(module: nn.Module, model: PreTrainedModel) -> str:
    problem = f"{type(module).__name__} of {type(model).__name__} computes in a way that packed experts cannot"
    return f"quantize_moe_experts: {problem}. Drop the key: they stay in half precision."


def _has_experts(module: nn.Module) -> bool:
    weight = module._parameters.get(WEIGHTS[-1])
    return weight is not None and len(weight.shape) == 3  # of the weight, also where it is packed
