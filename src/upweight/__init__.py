"""Upweight trains language models from feedback: from one YAML file, or from Python with the trainers named here."""

import sys
from typing import TYPE_CHECKING, Any

from upweight.version import __version__ as __version__

if TYPE_CHECKING:
    from upweight.data.trl_functions import (
        apply_chat_template,
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        pack_dataset,
        truncate_dataset,
        unpair_preference_dataset,
    )
    from upweight.train.api.configs import (
        CPOConfig,
        DPOConfig,
        KTOConfig,
        ORPOConfig,
        PRMConfig,
        RewardConfig,
        SFTConfig,
    )
    from upweight.train.api.distill import DistillationConfig, DistillationTrainer, GKDConfig, GKDTrainer
    from upweight.train.api.grpo import GRPOTrainer, RLOOTrainer
    from upweight.train.api.grpo_config import GRPOConfig, RLOOConfig
    from upweight.train.api.trainers import (
        CPOTrainer,
        DPOTrainer,
        KTOTrainer,
        ORPOTrainer,
        PRMTrainer,
        RewardTrainer,
        SFTTrainer,
    )

__all__ = [
    "CPOConfig", "CPOTrainer", "DPOConfig", "DPOTrainer", "DistillationConfig", "DistillationTrainer", "GKDConfig",
    "GKDTrainer", "GRPOConfig", "GRPOTrainer", "KTOConfig", "KTOTrainer",
    "ORPOConfig", "ORPOTrainer", "PRMConfig", "PRMTrainer", "RLOOConfig", "RLOOTrainer", "RewardConfig",
    "RewardTrainer", "SFTConfig", "SFTTrainer", "apply_chat_template", "extract_prompt", "is_conversational",
    "is_conversational_from_value", "maybe_apply_chat_template", "maybe_convert_to_chatml", "maybe_extract_prompt",
    "maybe_unpair_preference_dataset", "pack_dataset", "truncate_dataset", "unpair_preference_dataset",
]  # fmt: skip
_ROLLOUTS = ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer")
# Names of TRL's scripts that are not here, and what to use in place of each.
_INSTEAD = {
    "ModelConfig": "pass the model's name or folder as `model`, and `model_init_kwargs` to the config",
    "ScriptArguments": "load the rows with `datasets.load_dataset` and pass them as `train_dataset`",
    "TrlParser": "parse the configs with `transformers.HfArgumentParser`",
    "get_peft_config": "pass a `peft.LoraConfig` as `peft_config`",
    "get_quantization_config": "pass a `transformers.BitsAndBytesConfig` as `quantization_config` of a trainer",
    "get_kbit_device_map": "leave `device_map` out: each process loads the model onto its device",
}
_DISTILLS = ("DistillationConfig", "DistillationTrainer", "GKDConfig", "GKDTrainer")


def __getattr__(name: str) -> Any:
    """Import a trainer, config or helper on first use, so that `import upweight` stays fast."""
    if name in _INSTEAD:
        message = f"upweight has no {name}: {_INSTEAD[name]} (`upweight docs peers`)"
        if _asked_by_import():  # which replaces the message of an AttributeError
            raise ImportError(message, name=name)
        raise AttributeError(message, name=name)
    if name not in __all__:
        raise AttributeError(f"module 'upweight' has no attribute {name!r}")
    if name[0].islower():
        from upweight.data import trl_functions

        return getattr(trl_functions, name)
    import importlib

    # Only the modules that the name needs: each config is a class of 150 fields, which takes time to build.
    modules = ("grpo",) if name in _ROLLOUTS else ("distill",) if name in _DISTILLS else ("configs", "trainers")
    loaded = (importlib.import_module(f"upweight.train.api.{module}") for module in modules)
    return next(vars(module)[name] for module in loaded if name in vars(module))


def _asked_by_import() -> bool:
    """Return whether `from upweight import ...` asks for a name, and not `hasattr` or `upweight.name`."""
    return sys._getframe(2).f_code.co_name == "_handle_fromlist"  # of importlib


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
