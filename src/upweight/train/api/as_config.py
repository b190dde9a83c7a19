"""Convert a script's arguments and objects to a Config, and config errors to the script's argument names."""

import dataclasses
import enum
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from peft import PeftModel
from transformers import BitsAndBytesConfig

from upweight.config import Config
from upweight.config.config import SECTIONS, general_keys
from upweight.config.resolve import resolve
from upweight.config.rules import check
from upweight.config.rules.keys import switched_off
from upweight.config.sections.data import DatasetSpec
from upweight.config.sections.environment import ENVIRONMENT_REWARDS
from upweight.config.sections.model import SpecialTokens
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.train.api.fields import help_of
from upweight.train.objects import YAML_ONLY, Objects

OF_TRANSFORMERS = {  # arguments of transformers -> config keys
    **{name: name for name in (
        "output_dir", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "save_only_model",
        "eval_strategy", "eval_steps", "load_best_model_at_end", "metric_for_best_model", "hub_model_id",
        "learning_rate", "gradient_accumulation_steps", "max_steps", "optim_args", "lr_scheduler_kwargs",
        "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed",
        "neftune_noise_alpha", "full_determinism", "gradient_checkpointing", "gradient_checkpointing_kwargs",
        "torch_compile", "torch_empty_cache_steps", "fp16", "bf16", "deepspeed", "fsdp", "ddp_timeout",
        "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_drop_last",
    )},
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "num_epochs",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
}  # fmt: skip
PYTHON_WORDS = {"true": "True", "false": "False"}
NULLABLE = ("save_total_limit",)  # fields for which None is not the default
CHOICES = {"sft": {}, "orm": {"reward_model": True}, "prm": {"process_reward_model": True}}
OF_TRAINERS = {  # words of error messages -> inputs of a script
    "base_model": "model",
    "model_kwargs": "model_init_kwargs",
    "sequence_len": "max_length",
    "rl_adapter_ref_model": "ref_model",
    "datasets": "train_dataset",
    "test_datasets": "eval_dataset",
    "trl.reward_funcs": "reward_funcs",
    "trl.rollout_func": "rollout_func",
    "environment.type": "environment_factory",
    "environment.max_turns": "max_tool_calling_iterations",
    "load_in_4bit": "quantization_config",
    "load_in_8bit": "quantization_config",
    "'adapter: qlora'": "a `peft_config`",
    "'adapter: lora'": "a `peft_config`",
    "Name one, for example 'chat_template: chatml'": "Set its `chat_template`",
    "--resume": "resume_from_checkpoint=True",
    "name another folder or hub id with `tokenizer_config`": "pass a tokenizer as `processing_class`",
    "the key": "the argument",
    "upweight rewards CONFIG": "trainer.generate_completions(rows)",
    "read the newest file in completions/": "read what `trainer.generate_completions(rows)` shows",
    "read completions/": "read what `trainer.generate_completions(rows)` shows",
    "upweight preprocess CONFIG --show 2 --tokens": "trainer.train_dataset[0]",
    "upweight preprocess CONFIG --show 3": "trainer.train_dataset[0]",
    "upweight preprocess CONFIG --show 5": "trainer.train_dataset[0]",
    "resume_from_checkpoint=RUN/checkpoint-N": "trainer.train(resume_from_checkpoint='RUN/checkpoint-N')",
    "`reward_model: true`": "RewardTrainer",
    "lora_target_modules": "target_modules",
}


def build_config(args: Any, objects: Objects = YAML_ONLY, name: str | None = None) -> Config:
    """Return the config of a script's arguments and objects; `name` is that of a model to load."""
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for argument, path in OF_TRANSFORMERS.items():
        section, key = general_keys()[path]
        value = getattr(args, argument)
        values[section][key.name] = value.value if isinstance(value, enum.Enum) else value
    values["optim"] |= {"max_steps": args.max_steps if args.max_steps > 0 else None}
    values["data"] |= args.data_settings() | {"datasets": _datasets(args, objects)}
    streamed = [isinstance(rows, IterableDataset) for rows in objects.eval_sets().values()]
    tests = [args.dataset_row().model_copy(update={"streaming": one}) for one in streamed]
    values["data"] |= {"test_datasets": tests}
    plugin = args.fsdp_plugin_args or {}
    wrapping = {"state_dict": plugin.get("state_dict_type"), "wrap_policy": plugin.get("auto_wrap_policy")}
    values["sharding"] |= {"fsdp": bool(args.fsdp), "low_memory_loading": args.deepspeed is not None, **wrapping}
    values["choice"] = CHOICES.get(args.method_class.name, {"rl": args.method_class.name})
    values["model"] |= _model_settings(args, objects, name)
    values["adapter"] |= _adapter_settings(args, objects)
    funcs, factory = objects.reward_funcs, objects.environment_factory
    rewards = funcs if isinstance(funcs, list | tuple) else [] if funcs is None else [funcs]
    names = [reward if isinstance(reward, str) else str(_name_of(reward)) for reward in rewards]
    names += ENVIRONMENT_REWARDS[:1] if factory is not None else []  # it may give rewards too
    values["rollout"] |= {"reward_funcs": names, "rollout_func": _name_of(objects.rollout_func)}
    calling = getattr(args, "max_tool_calling_iterations", None)
    values["environment"] |= {"max_turns": None if calling is None else calling + 1, "class_path": _name_of(factory)}
    values["environment"] |= {"kind": None if factory is None else "python"}
    values["environment"] |= {"tools": [_name_of(tool) for tool in objects.tools or ()]}
    sections: dict[str, Any] = {
        section: args.section(kind).model_copy(
            update={field: value for field, value in values[section].items() if value is not None or field in NULLABLE}
        )
        for section, kind in SECTIONS.items()
    }
    return resolve(Config(**sections, method=args.method(), set_keys=_set_keys(args), folder=Path.cwd()))


def _datasets(args: Any, objects: Objects) -> list[DatasetSpec]:
    """Return an entry for each training set: how it is weighted, and whether it is a stream."""
    given = objects.train_sets()
    weights = args.mix_weights or {}
    if weights and objects.train_dataset is not None and set(weights) != set(given):
        raise UserError(f"mix_weights: has {', '.join(weights)}; the datasets are {', '.join(given)}.")
    return [
        args.dataset_row().model_copy(
            update={"weight": weights.get(name), "streaming": isinstance(rows, IterableDataset)}
        )
        for name, rows in given.items()
    ]


def checked_config(args: Any, objects: Objects = YAML_ONLY, name: str | None = None) -> Config:
    """Return the config of a script; raise with every rule that its arguments break."""
    config = build_config(args, objects, name)
    # The rules assume one process, so the batch of all ranks is passed to them.
    batch = args.per_device_train_batch_size * args.world_size
    seen = dataclasses.replace(config, optim=config.optim.model_copy(update={"micro_batch_size": batch}))
    translate_error = error_translator(type(args))
    errors, warnings = check(seen, fragment=True)
    if errors:
        raise UserError("\n".join(dict.fromkeys(map(translate_error, errors))))
    for warning in (*warnings, *switched_off(seen)):
        warn_once(translate_error(warning))
    return config


@cache
def error_translator(kind: type) -> Callable[[str], str]:
    """Return a function that replaces config keys in a message by the arguments of a config class."""
    names = {**{path: argument for argument, path in OF_TRANSFORMERS.items()}, **OF_TRAINERS}
    for one in dataclasses.fields(kind):
        if (key := help_of(one).setting) is not None:
            names[key.path] = one.name
    names = {path: argument for path, argument in names.items() if path != argument}
    longest_first = [re.escape(path) for path in sorted(names, key=len, reverse=True)]
    words, compound = "|".join(longest_first), "|".join(path for path in longest_first if re.search(r"[._ -]", path))
    # A key of one word may be plain English: it is a key at the start of a line or in quotes.
    pattern = re.compile(rf"(?m)(?<![\w.])(?:{compound})(?!\w)|^(?:{words})(?=[:,])|(?<=')(?:{words})(?=[':])")

    def as_argument(match: re.Match[str]) -> str:
        mark, name, value = match.groups()
        quoted = value if re.fullmatch(r"[\d.]+(e-?\d+)?", value) else f'"{value}"'
        return f"{mark}{name}={PYTHON_WORDS.get(value, quoted)}{mark}"

    def translate_error(message: str) -> str:
        named = pattern.sub(lambda match: names[match[0]], message)
        return re.sub(r"(['`])(\w+): ([^'` ]+)\1", as_argument, named)

    return translate_error


def _set_keys(args: Any) -> dict[str, Any]:
    """Return config key -> value, for every argument that differs from its default."""
    values = {}
    for one in dataclasses.fields(args):
        key = help_of(one).setting
        path = OF_TRANSFORMERS.get(one.name) if key is None else key.path
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        if path is not None and (value := getattr(args, one.name)) not in (None, default):
            values[path] = value
    return values


def _model_settings(args: Any, objects: Objects, name: str | None) -> dict[str, Any]:
    """Return the model settings of the arguments about loading."""
    given = args.model_init_kwargs or {}
    elsewhere = ("dtype", "torch_dtype", "load_in_4bit", "load_in_8bit")
    options = {
        key: value for key, value in given.items() if key not in elsewhere and not isinstance(value, BitsAndBytesConfig)
    }
    if options.pop("device_map", None) is not None:
        warn_once("model_init_kwargs: device_map has no effect: the trainer places the model")
    labels, model = options.pop("num_labels", None), objects.model
    if model is not None:
        name = model.config.name_or_path or type(model).__name__
        labels = model.config.num_labels if args.method_class.head != "tokens" else None
    return {
        "base_model": name,
        "num_labels": labels,
        "revision": options.pop("revision", None),
        "trust_remote_code": options.pop("trust_remote_code", args.trust_remote_code),
        "load_options": options,
        "special_tokens": SpecialTokens(eos_token=args.eos_token, pad_token=args.pad_token),
    }


def _adapter_settings(args: Any, objects: Objects) -> dict[str, Any]:
    peft_config: Any = objects.peft_config
    if peft_config is None and isinstance(objects.model, PeftModel):
        peft_config = objects.model.active_peft_config
    settings: dict[str, Any] = {"separate_reference": objects.reference is not None}
    if peft_config is not None:
        settings |= {"kind": str(peft_config.peft_type.value).lower()}
        if hasattr(peft_config, "lora_alpha"):
            settings |= {"rank": peft_config.r, "alpha": peft_config.lora_alpha}
    if (packed := objects.quantization_config) is not None:
        kept = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        options = {key: value for key, value in packed.to_dict().items() if key in kept or key.startswith("llm_int8")}
        settings |= {"load_in_4bit": packed.load_in_4bit, "load_in_8bit": packed.load_in_8bit, "quantisation": options}
        settings["pack_experts"] = args.quantize_moe_experts
    elif args.quantize_moe_experts and objects is not YAML_ONLY:
        remedy = "Pass the trainer the model's name and 'quantization_config=BitsAndBytesConfig(load_in_4bit=True)'"
        raise UserError(f"quantize_moe_experts: experts are quantised while a model is loaded in 4 bits. {remedy}.")
    return settings


def _name_of(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "__name__", type(value).__name__))
