"""Upweight trains language models from feedback: from one YAML file, or from Python with the trainers named here."""

import sys
from typing import TYPE_CHECKING, Any

from upweight.errors import closest
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
    from upweight.train.api.script_arguments import (
        ModelConfig,
        ScriptArguments,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from upweight.train.api.script_datasets import DatasetMixtureConfig, get_dataset
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
    "CPOConfig", "CPOTrainer", "DPOConfig", "DPOTrainer", "DatasetMixtureConfig", "DistillationConfig",
    "DistillationTrainer", "GKDConfig", "GKDTrainer", "GRPOConfig", "GRPOTrainer", "KTOConfig", "KTOTrainer",
    "ModelConfig", "ORPOConfig", "ORPOTrainer", "PRMConfig", "PRMTrainer", "RLOOConfig", "RLOOTrainer",
    "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer", "ScriptArguments", "TrlParser", "apply_chat_template",
    "extract_prompt", "get_dataset", "get_kbit_device_map", "get_peft_config", "get_quantization_config",
    "is_conversational", "is_conversational_from_value", "maybe_apply_chat_template", "maybe_convert_to_chatml",
    "maybe_extract_prompt", "maybe_unpair_preference_dataset", "pack_dataset", "truncate_dataset",
    "unpair_preference_dataset",
]  # fmt: skip
_ROLLOUTS = ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer")
_SCRIPTS = (
    "ModelConfig", "ScriptArguments", "TrlParser", "get_kbit_device_map", "get_peft_config", "get_quantization_config",
)  # fmt: skip
# Names of TRL, of today and of earlier versions, that are not here, by what to use in place of them.
_NOT_HERE = {
    "write a dataclass with the fields that the script reads": ("DPOScriptArguments", "SFTScriptArguments"),
    "PPO's value model is not here; GRPOTrainer and RLOOTrainer learn from the same rewards without one": (
        "PPOConfig", "PPOTrainer", "PPOv2Config", "PPOv2Trainer", "AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead",
    ),
    "GRPOTrainer learns from completions that are sampled while it trains": (
        "OnlineDPOConfig", "OnlineDPOTrainer", "NashMDConfig", "NashMDTrainer", "XPOConfig", "XPOTrainer",
    ),
    "KTOTrainer learns from single answers with a label": ("BCOConfig", "BCOTrainer"),
    "diffusion models are not trained": ("AlignPropConfig", "AlignPropTrainer", "DDPOConfig", "DDPOTrainer"),
    "GRPOTrainer runs rollouts beside training with `use_vllm=True`": ("AsyncGRPOConfig", "AsyncGRPOTrainer"),
    "SFTTrainer trains on rows; call it once for each round": ("IterativeSFTConfig", "IterativeSFTTrainer"),
    "set the tokenizer's `chat_template`, or `chat_template_path` of SFTConfig": (
        "clone_chat_template", "setup_chat_format",
    ),
    "leave it out: `assistant_only_loss` finds the turns with any template": ("get_training_chat_template",),
    "leave it out: trainers pack the rows themselves": (
        "ConstantLengthDataset", "DataCollatorForChatML", "DataCollatorForLanguageModeling",
        "DataCollatorForPreference", "DPODataCollatorWithPadding", "RewardDataCollatorWithPadding",
    ),
    "leave it out: messages with images are read as they are": ("prepare_multimodal_messages",),
    "`trainer.generate_completions(rows)` samples from a policy, `upweight inference RUN` from a trained model": (
        "unwrap_model_for_generation", "BestOfNSampler",
    ),
    "GKDTrainer and DistillationTrainer learn from a better model": (
        "MiniLLMConfig", "MiniLLMTrainer", "SDFTConfig", "SDFTTrainer",
    ),
    "GKDTrainer and DistillationTrainer learn from a model with another tokenizer with `teacher_align='text'`": (
        "GOLDConfig", "GOLDTrainer",
    ),
    "set `completion_only_loss` or `assistant_only_loss` of SFTConfig": ("DataCollatorForCompletionOnlyLM",),
    "leave `ref_model` out: the reference is the model as training begins": ("create_reference_model",),
    "set `sync_ref_model=True`": ("SyncRefModelCallback",),
    "leave it out: every run shows its progress and writes metrics to its folder": ("RichProgressCallback",),
    "leave it out: online runs keep completions in their folder (`upweight watch RUN`)": ("LogCompletionsCallback",),
    "write a `transformers.TrainerCallback`, which every trainer takes": (
        "BEMACallback", "MergeModelCallback", "WeaveCallback", "WinRateCallback",
    ),
    "a reward function may ask any model; the built-in reward `judge` asks a server": (
        "BasePairwiseJudge", "HfPairwiseJudge", "OpenAIPairwiseJudge", "PairRMJudge",
    ),
}  # fmt: skip
_INSTEAD = {name: text for text, names in _NOT_HERE.items() for name in names}
_SCRIPT_DATASETS = ("DatasetMixtureConfig", "get_dataset")
_DISTILLS = ("DistillationConfig", "DistillationTrainer", "GKDConfig", "GKDTrainer")


def __getattr__(name: str) -> Any:
    """Import a trainer, config or helper on first use, so that `import upweight` stays fast."""
    if name in _INSTEAD:
        message = f"upweight has no {name}: {_INSTEAD[name]} (`upweight docs peers`)"
        if _asked_by_import():  # which replaces the message of an AttributeError
            raise ImportError(message, name=name)
        raise AttributeError(message, name=name)
    if name not in __all__:
        near = closest(name, __all__, 0.85)
        message = f"upweight has no {name!r}" + (f". Did you mean {near!r}?" if near else "")
        if near and _asked_by_import():  # nothing near: it may be a module, which is imported next
            raise ImportError(message, name=name)
        raise AttributeError(message, name=name)
    import importlib

    # Only the modules that the name needs: each config is a class of 150 fields, which takes time to build.
    if name in _SCRIPTS:
        modules = ("train.api.script_arguments",)
    elif name in _SCRIPT_DATASETS:
        modules = ("train.api.script_datasets",)
    elif name[0].islower():
        modules = ("data.trl_functions",)
    elif name in _ROLLOUTS:
        modules = ("train.api.grpo",)
    elif name in _DISTILLS:
        modules = ("train.api.distill",)
    else:
        modules = ("train.api.configs", "train.api.trainers")
    loaded = (importlib.import_module(f"upweight.{module}") for module in modules)
    return next(vars(module)[name] for module in loaded if name in vars(module))


def _asked_by_import() -> bool:
    """Return whether `from upweight import ...` asks for a name, and not `hasattr` or `upweight.name`."""
    return sys._getframe(2).f_code.co_name == "_handle_fromlist"  # of importlib


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _ModulesOfTRL:
    """Answers an import from a module of TRL with where its names are; it is asked last, when no file was found."""

    NAMES = ("chat_template_utils", "data_utils", "experimental", "extras", "scripts", "trainer")

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("upweight.") and fullname.split(".")[1] in cls.NAMES:
            raise ModuleNotFoundError(
                f"there is no {fullname}: the names of TRL are in `upweight` itself, rewards in `upweight.rewards`. "
                "`from trl.experimental.orpo import ORPOTrainer`, as an example, becomes `from upweight import "
                "ORPOTrainer` (`upweight docs peers`)",
                name=fullname,
            )


sys.meta_path.append(_ModulesOfTRL)
