"""Adapters on mixtures of experts: what PEFT makes of names, which options it ignores there, and which are routers."""

import copy
import re
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.models.kernels.packed_product import is_packed

_ROUTER = re.compile("Router|Gating|TopKGate")  # in the names of their classes
_OLD_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")  # of expert layers, before they were fused
_IGNORED = ("layers_to_transform", "exclude_modules")  # by PEFT, for parameters
EXPERTS = "lora_target_parameters: [experts.gate_up_proj, experts.down_proj]"


def is_router(model: PreTrainedModel, name: str) -> bool:
    """Return whether a module is a router of experts, or part of one."""
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(_ROUTER.search(type(model.get_submodule(path)).__name__) for path in paths)


def expert_hint(target: str, known: Sequence[str]) -> str:
    """Return how experts are adapted, where a name is that of their former layers and the model has fused ones."""
    fused = any(name.startswith("experts.") or name == "experts" for name in known)
    return f" Experts are one weight for a layer: set '{EXPERTS}'." if fused and target in _OLD_NAMES else ""


def of_layers(names: Sequence[str], parameters: list[str], layers: list[int] | None) -> list[str]:
    """Return the parameters to adapt; those of some layers by their whole names, since PEFT would adapt all."""
    if layers is None:
        return parameters
    chosen = {str(layer) for layer in layers}
    matching = [name for name in names if any(name == one or name.endswith("." + one) for one in parameters)]
    return [name for name in matching if chosen.intersection(name.split("."))]


def of_pattern(model: PreTrainedModel, pattern: str) -> list[str] | str:
    """Return a pattern of modules as it is, or their whole names for mixtures, of which PEFT keeps last names only."""
    if not _taken_for_experts(model, list(_OLD_NAMES)):
        return pattern
    names = [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]
    return without_experts(model, names, names)


def log_frozen_routers(model: PreTrainedModel) -> None:
    """Log that an adapter leaves the routers of a mixture as they are, unless it trains them."""
    routers = [name for name, _ in model.named_modules() if name and is_router(model, name)]
    names = [name.removesuffix(".base_layer") for name in routers]  # of the wrapper that holds the adapter
    trained = any(weight.requires_grad for name in names for weight in model.get_submodule(name).parameters())
    if names and not trained:
        logger.info("the routers of %s stay as they are; lora_target_parameters may name their weights", names[0])


def check_packed(model: nn.Module) -> None:
    """Raise where a weight is to be trained of which only the packed bytes are there."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and is_packed(weight):
            module = name.partition(".modules_to_save")[0].removeprefix("base_model.model.")
            remedy = "Leave it out, or drop 'load_in_4bit' ('quantize_moe_experts' for experts)"
            raise UserError(f"lora_modules_to_save: {module} is held in 4 bits, which cannot be trained. {remedy}.")


def without_experts(model: PreTrainedModel, targets: list[str], named: Sequence[str]) -> list[str]:
    """Return the modules to adapt without those whose names PEFT takes for routed experts; raise for a `named` one."""
    taken = [name for name in targets if name in _taken_for_experts(model, targets)]
    if refused := [name for name in taken if name in named]:
        remedy = f"Leave it out, or adapt the routed experts with '{EXPERTS}'"
        problem = f"PEFT takes {', '.join(refused)} of {type(model).__name__} for its routed experts"
        raise UserError(f"lora_target_modules: {problem}, not for layers of these names. {remedy}.")
    if taken:
        warn_once(f"{', '.join(taken)} of {type(model).__name__} are not adapted: PEFT takes them for routed experts")
    return [name for name in targets if name not in taken]


def check_expert_options(model: Any, config: PeftConfig) -> None:
    """Raise for a script's adapter whose options PEFT ignores for experts, or which would train the router unasked."""
    if not isinstance(config, LoraConfig) or not hasattr(model, "config"):
        return
    before = set(config.target_parameters or ())
    after = set(_converted(model, config).target_parameters or ())
    set_options = [name for name in _IGNORED if getattr(config, name, None)]
    if after and set_options:
        remedy = "Name the parameters of those layers in full, as 'model.layers.0.mlp.experts.down_proj'."
        raise UserError(f"peft_config: PEFT ignores {set_options[0]} for target_parameters. {remedy}")
    routers = sorted(name for name in after - before if name.startswith(("gate.", "router.")) or ".gate." in name)
    if routers and config.target_modules == "all-linear":
        remedy = "Name the layers (q_proj, v_proj, ...), and experts in target_parameters"
        raise UserError(f"peft_config: 'all-linear' also takes the router ({', '.join(routers)}). {remedy}.")
    if after - before:
        adapted = ", ".join(sorted(after - before))
        warn_once(
            f"peft_config: target_modules names former layers of experts: PEFT adapts {adapted} of all routed experts, "
            "fused ones at twice the rank, and no other layers of these names"
        )


def _taken_for_experts(model: PreTrainedModel, targets: list[str]) -> set[str]:
    """Return the module names that PEFT would replace by parameters of routed experts."""
    # Each with all of the old names, since PEFT refuses some without the others.
    config = LoraConfig(target_modules=sorted({*targets, *_OLD_NAMES}))
    return {*targets} - {*(_converted(model, config).target_modules or ())}


def _converted(model: Any, config: LoraConfig) -> LoraConfig:
    """Return a copy of the config as PEFT changes it for models whose expert layers are fused now."""
    changed = copy.deepcopy(config)
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # a PEFT that changes nothing
        return changed
    try:
        convert_peft_config_for_transformers(changed, model, None)
    except ValueError as error:
        raise UserError(f"adapter: PEFT does not take these targets: {error}") from error
    return changed
