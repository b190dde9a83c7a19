"""Attach a LoRA adapter to a loaded model, or continue one from a folder."""

import copy
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft import LoftQConfig, LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from upweight.config.sections.model import AdapterSection
from upweight.errors import UserError, did_you_mean
from upweight.log import logger, warn_once
from upweight.models.adapters.experts import (
    check_expert_options,
    check_packed,
    expert_hint,
    is_router,
    log_frozen_routers,
    of_layers,
    of_pattern,
    without_experts,
)
from upweight.models.first_look import broken_weights
from upweight.settings import values_by_path

ADAPTER_ATTRIBUTE = "_upweight_adapter"
TASKS = {"ForSequenceClassification": TaskType.SEQ_CLS, "ForTokenClassification": TaskType.TOKEN_CLS}


def attach_adapter(
    model: PreTrainedModel, section: AdapterSection, *, new_tokens: int = 0, excluded: str | None = None
) -> PeftModel:
    """Attach a trainable adapter, fresh or continued from `lora_model_dir`, and freeze everything else.

    `excluded`: a pattern of names of modules that are not adapted.
    """
    if section.folder is not None:
        return _load_adapter(model, section.folder)
    config = lora_config(model, section)
    config.exclude_modules = excluded
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"adapter: PEFT does not take these options: {error}. Correct them.") from error
    assert isinstance(adapted, PeftModel)
    check_packed(adapted)
    log_frozen_routers(model)
    if new_tokens and not any(p.requires_grad for p in model.get_input_embeddings().parameters()):
        remedy = f"add embedding and head to lora_modules_to_save (here {', '.join(embedding_names(model))})"
        warn_once(f"tokens: the embeddings of {new_tokens} new tokens are not trained; {remedy}")
    return adapted


def new_adapter(model: Any, config: PeftConfig) -> PeftModel:
    """The model with a fresh adapter of a script, which is found again when the same model is handed over once more."""
    asked = _adapter_settings(config)  # before PEFT finds the modules that it means
    check_expert_options(model, config)
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        layers = {
            name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)
        }
        remedy = f"Linear layers of the model: {', '.join(sorted(layers))}"
        raise UserError(f"peft_config: {str(error).strip().removesuffix('.')}. {remedy}.") from error
    assert isinstance(adapted, PeftModel)
    vars(model)[ADAPTER_ATTRIBUTE] = adapted, asked  # not as a module of the model, which it holds itself
    return adapted


def kept_adapter(model: PreTrainedModel, config: PeftConfig | None) -> PeftModel | None:
    """The PeftModel whose layers a base model has, if `new_adapter` made it and `config` asks for no other one."""
    if not any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        return None
    if ADAPTER_ATTRIBUTE not in vars(model):
        raise UserError(
            "model: has the layers of an adapter, but is no PeftModel. Hand that over, or `merge_and_unload()` it."
        )
    adapted, asked = vars(model)[ADAPTER_ATTRIBUTE]
    if config is not None and _adapter_settings(config) not in (asked, _adapter_settings(adapted.active_peft_config)):
        raise UserError(
            "peft_config: the model has the adapter of an earlier trainer, which is another one. Leave out peft_config "
            "to go on with it, or take `trainer.model.merge_and_unload()` for the model."
        )
    return adapted


def _adapter_settings(config: PeftConfig) -> dict[str, Any]:
    """What a config says of an adapter, without what PEFT notes of the model."""
    return {**config.to_dict(), "base_model_name_or_path": None, "inference_mode": False, "revision": None}


def lora_config(model: PreTrainedModel, section: AdapterSection) -> LoraConfig:
    """Return the PEFT config of the adapter in the settings, with every target checked against this model."""
    options = _passed_on(section)
    if section.peft.loftq_config is not None:
        loftq = LoftQConfig(loftq_bits=section.peft.loftq_config.loftq_bits)
        options |= {"init_lora_weights": "loftq", "loftq_config": loftq}
    parameters = _as_list(section.target_parameters)
    names = [name for name, _ in model.named_parameters()]
    known = sorted({".".join(name.split(".")[-2:]) for name in names})
    _check_targets(names, parameters, "lora_target_parameters", shown=known, known=known)
    targets = _target_modules(model, section)
    saved = list(section.modules_to_save or [])
    _check_names(model, saved, "lora_modules_to_save")
    saved += [name for name in _score_layers(model) if name not in saved]
    # A fully trained module that is tied to another one has to stay so.
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    options |= {
        "task_type": _task_type(model),
        "target_modules": targets,
        "target_parameters": of_layers(names, parameters, section.layers) or None,
        "modules_to_save": saved or None,
        "ensure_weight_tying": tied and not {*saved}.isdisjoint(embedding_names(model)),
    }
    return LoraConfig(**options)


def _passed_on(section: AdapterSection) -> dict[str, Any]:
    """Return the keys that are an argument of PEFT, perhaps after `lora_` or `peft_`."""
    names = {field.name for field in fields(LoraConfig)}
    values = copy.deepcopy(values_by_path(section))
    arguments = {path: path if path in names else re.sub("^(lora|peft)_", "", path) for path in values}
    return {name: values[path] for path, name in arguments.items() if name in names}


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the names by which PEFT finds a model's linear layers, without its head."""
    head, after = model.get_output_embeddings(), _score_layers(model)
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and name.split(".")[0] not in after
        if not is_router(model, name)
    ]
    # Last names as a rule. A number would find blocks too, and `proj` in a vision tower its convolution.
    others = {name for name, module in model.named_modules() if not isinstance(module, nn.Linear | Conv1D)}
    of_others = set().union(*(_endings(name) for name in others))
    names = dict.fromkeys(next((end for end in _endings(name) if end not in of_others), name) for name in linear)
    heads = {"lm_head", "score", "classifier"} if _task_type(model) != TaskType.CAUSAL_LM else {"lm_head"}
    return [name for name in names if name not in heads]


def _endings(name: str) -> list[str]:
    """Return the ends of a module's name, from the last part to the whole."""
    parts = name.split(".")
    return [".".join(parts[-size:]) for size in range(1, len(parts) + 1)]


def _score_layers(model: PreTrainedModel) -> list[str]:
    """Return the fresh layers between a classifier's body and its score, which are trained and saved with it."""
    if _task_type(model) == TaskType.CAUSAL_LM:
        return []
    after = [(name, part) for name, part in model.named_children() if part is not model.base_model]
    weighty = [name for name, part in after if next(part.parameters(), None) is not None]
    return [name for name in weighty if name not in ("score", "classifier")]  # PEFT saves these itself


def _target_modules(model: PreTrainedModel, section: AdapterSection) -> list[str] | str:
    """Return the modules to adapt: a list of names, or a pattern."""
    pattern = None if section.target_linear else section.targets
    if isinstance(pattern, str) and any(re.fullmatch(pattern, name) for name, _ in model.named_modules()):
        return of_pattern(model, pattern)
    named = _as_list(section.targets)
    _check_names(model, named, "lora_target_modules")
    if section.target_linear or not (named or section.target_parameters):
        if not section.target_linear:
            logger.info("lora_target_modules is not set: every linear layer but the head is adapted")
        return without_experts(model, [*named, *(name for name in linear_names(model) if name not in named)], named)
    return without_experts(model, named, named)


def _check_names(model: PreTrainedModel, targets: list[str], key: str) -> None:
    names = [name for name, _ in model.named_modules()]
    known = {name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()} - {""}
    _check_targets(names, targets, key, shown=linear_names(model), known=sorted(known))


def _check_targets(names: list[str], targets: list[str], key: str, *, shown: list[str], known: list[str]) -> None:
    """Raise for a target that matches none of the names, with the names of the model and the closest one."""
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            meant = expert_hint(target, known) or did_you_mean(target, known)
            raise UserError(f"{key}: {target!r} matches nothing in the model.{meant} It has {', '.join(shown)}.")


def _load_adapter(model: PreTrainedModel, folder: str) -> PeftModel:
    """Load the adapter of `folder` for further training, with the settings saved there."""
    if Path(folder).exists() and not (Path(folder) / "adapter_config.json").is_file():
        raise UserError(f"lora_model_dir: {folder!r} holds no adapter_config.json; name the folder of an adapter")
    try:
        config = PeftConfig.from_pretrained(folder)
    except ValueError as error:
        raise UserError(
            f"lora_model_dir: no adapter at {folder!r}: not a folder here, and the hub did not give it ({error})"
        ) from None
    if (broken := broken_weights(Path(folder))) is not None:
        raise UserError(f"lora_model_dir: {folder!r} does not hold a whole adapter: {broken}.")
    logger.info("adapter: the one in %s, with the rank, alpha and targets saved there", folder)
    try:
        return PeftModel.from_pretrained(model, folder, config=config, is_trainable=True)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"lora_model_dir: the adapter in {folder!r} does not fit this base model: {error}") from None


def _task_type(model: PreTrainedModel) -> TaskType:
    name = type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), TaskType.CAUSAL_LM)


def _as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def embedding_names(model: PreTrainedModel) -> list[str]:
    """Return the last names of the modules that hold input and output embeddings."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name.rpartition(".")[2] for name, module in model.named_modules() if any(module is x for x in layers)]
