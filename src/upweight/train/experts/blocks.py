"""Experts on several ranks: which of them a rank's tokens choose changes nothing in what ranks gather and reduce."""

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from upweight.errors import UserError
from upweight.models.kernels.experts.grouped import WEIGHTS
from upweight.models.precision import Sharding

_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")  # of PEFT, in paths
_CALLED = "_called_experts"  # of a block, in its current forward


def expert_blocks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the paths of the blocks that hold experts, with their experts where each is a module of its own."""
    blocks: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        block, _, name = _WRAPPERS.sub("", path).rpartition(".")
        if isinstance(module, nn.ModuleList) and "expert" in name and len(module) > 1:
            blocks.setdefault(block, []).extend(module)
        elif not isinstance(module, ParamWrapper) and any(map(_is_fused, _weights(module))):
            blocks.setdefault(block, [])
    return blocks


def set_up_experts(model: nn.Module, sharding: Sharding) -> None:
    """Give experts that no token of a rank chose a gradient of zero; have DeepSpeed gather the experts of a layer."""
    for path, experts in expert_blocks(model).items():
        block = model.get_submodule(path)
        if sharding == "deepspeed":  # it would gather an expert where its tokens need it, and other ranks would wait
            import_module("deepspeed.utils").set_z3_leaf_module(block, True)
        is_new = not any("_block" in vars(expert) for expert in experts)
        if is_new and any(weight.requires_grad for expert in experts for weight in expert.parameters()):
            block.register_forward_pre_hook(_forget_calls)
            block.register_forward_hook(_reach_other_experts)
            for expert in experts:
                vars(expert)["_block"] = [block]  # in a list: it is no part of the expert
                expert.register_forward_pre_hook(_note_call)


def refuse_units_of_experts(model: nn.Module, layers: str | Sequence[str] | None) -> None:
    """Raise where FSDP2 would gather parts of a block by themselves that are read from outside, or not on each rank."""
    named = [layers] if isinstance(layers, str) else layers or []
    for path, experts in expert_blocks(model).items():
        block = model.get_submodule(path)
        parts = {type(module).__name__: module for module in block.modules() if module is not block}
        if not experts and not any(isinstance(module, ParamWrapper) for module in parts.values()):
            continue
        if refused := [name for name in named if name in parts]:
            problem = f"'{refused[0]}' is a part of {path}, whose experts have to be gathered together"
            remedy = "Name the class of the decoder layer, or leave the key out"
            raise UserError(f"fsdp_config.transformer_layer_cls_to_wrap: {problem}. {remedy}.")


def _weights(module: nn.Module) -> list[nn.Parameter]:
    return [weight for name, weight in module.named_parameters(recurse=False) if name in WEIGHTS]


def _is_fused(weight: Any) -> bool:
    return len(getattr(weight, "ds_shape", weight.shape)) == 3  # ZeRO-3 leaves an empty weight behind


def _forget_calls(block: nn.Module, args: Any) -> None:
    vars(block)[_CALLED] = set()


def _note_call(expert: nn.Module, args: Any) -> None:
    vars(vars(expert)["_block"][0]).setdefault(_CALLED, set()).add(expert)


def _reach_other_experts(block: nn.Module, args: Any, output: Any) -> Any:
    """Add zero times a number of each trained weight that no token came to, so that every rank has its gradient."""
    if not torch.is_grad_enabled():
        return None
    called = vars(block).pop(_CALLED, set())
    others = [module for module in block.modules() if "_block" in vars(module) and module not in called]
    unread = [weight for expert in others for weight in expert.parameters() if weight.requires_grad]
    if not unread:
        return None
    states = output if isinstance(output, Tensor) else output[0]
    zero = torch.stack([weight.flatten()[0].to(states.dtype) for weight in unread]).sum() * 0
    return states + zero if isinstance(output, Tensor) else (states + zero, *output[1:])
