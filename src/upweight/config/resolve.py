"""Fills in values that follow from other keys."""

import dataclasses
from math import lcm
from typing import Any

from upweight.config.config import Config, general_keys
from upweight.config.sections.data import DatasetSpec
from upweight.config.sections.rollout import IN_PROCESS
from upweight.methods import feature_matcher
from upweight.methods.base import Method

LEAN_HEAD_TOKENS = 256  # scored tokens of a forward whose logits exist at a time
FAST_SHARE = 0.8  # of the free memory, for activations that are kept


def resolve(config: Config) -> Config:
    """Return the config with every derived value filled in."""
    config = _with_memory_mode(config)
    method = config.method
    rate_of_method = (config.adapter.kind and method.lora_learning_rate) or method.learning_rate
    labels_of_head = {"sequence_score": 1, "step_score": 2}.get(method.head)
    host, port = config.rollout.server_host or config.vllm.host, config.rollout.server_port or config.vllm.port
    optim = {
        "learning_rate": rate_of_method if config.optim.learning_rate is None else config.optim.learning_rate,
        "gradient_checkpointing": config.optim.gradient_checkpointing or config.sharding.fsdp_checkpointing,
        **_resolve_batch_size(config),
        **_resolve_schedule(config),
    }
    return dataclasses.replace(
        config,
        optim=config.optim.model_copy(update=optim),
        sharding=config.sharding.model_copy(update=_resolve_sharding(config)),
        data=config.data.model_copy(update={"datasets": _datasets(config)}),
        model=config.model.model_copy(update={"num_labels": config.model.num_labels or labels_of_head}),
        method=_resolve_method(config),
        rollout=config.rollout.model_copy(update={"server_host": host, "server_port": port}),
    )


def memory_settings(config: Config) -> dict[str, Any]:
    """Return what the key `memory` sets, by YAML path: keys that the config does not have itself."""
    optim, given = config.optim, config.set_keys
    written = given.get("gradient_checkpointing_kwargs") or {}  # those of a resolved config are in `optim` too
    whole = not (_resolve_sharding(config)["fsdp"] or config.sharding.deepspeed)  # weights and activations on each rank
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if optim.memory == "lean":
        options = {} if "keep" in written else {"every_layer": True}
        settings = {"gradient_checkpointing": True, "head_chunk_tokens": LEAN_HEAD_TOKENS}
        recomputes = "gradient_checkpointing" not in given or optim.gradient_checkpointing
        settings |= {"activation_offloading": True} | ({"tiled_mlp": True} if recomputes else {}) if whole else {}
        settings |= {"reference_offloading": True} if whole and _has_movable_reference(config) else {}
        in_process = config.method.online and config.rollout.backend == IN_PROCESS
        settings |= {"trl.release_sampler": True} if in_process else {}
    elif optim.memory == "fast" and whole and config.sharding.context_parallel_size == 1:
        options = {} if written.get("every_layer") else {"keep": FAST_SHARE}
        settings = {"gradient_checkpointing": True}
    settings = {path: value for path, value in settings.items() if path not in given}
    missing = {name: value for name, value in options.items() if name not in written}
    if missing and settings.get("gradient_checkpointing", optim.gradient_checkpointing):
        settings["gradient_checkpointing_kwargs"] = {**written, **missing}
    return settings


def _has_movable_reference(config: Config) -> bool:
    """Return whether there is a reference or a teacher that host memory can hold while it is not used."""
    quantised = config.teacher.load_in_4bit or config.teacher.load_in_8bit
    needs = config.method.needs_reference or config.method.needs_teacher
    return bool(needs and not quantised and not config.adapter.separate_reference)


def _with_memory_mode(config: Config) -> Config:
    """Return the config with the keys that `memory` sets."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in memory_settings(config).items():
        section, key = general_keys()[path]
        sections.setdefault(section, {})[key.name] = value
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def _datasets(config: Config) -> list[DatasetSpec]:
    """Return the entries of training data, each with whether it is streamed."""
    data = config.data
    return [
        row.model_copy(update={"streaming": True}) if row.streaming is None and data.streaming else row
        for row in data.datasets
    ]


def group_size(config: Config) -> int:
    """Return the completions per prompt; 1 for offline methods."""
    return config.method.group_size if config.method.online else 1


def generation_batch(config: Config, ranks: int = 1) -> int:
    """Return the completions per rollout over all ranks: a multiple of the optimizer batch and of the group size."""
    micro, accumulation = config.optim.micro_batch_size or 1, config.optim.accumulation or 1
    wanted = micro * ranks * (config.rollout.steps_per_generation or accumulation)
    return lcm(config.rollout.generation_batch_size or wanted, group_size(config), micro * accumulation * ranks)


def _resolve_method(config: Config) -> Method:
    """Return the method with EBFT's baseline filled in, which GRPO's keys may choose too."""
    method, given = feature_matcher(config.method), config.set_keys
    if method is None or method.baseline is not None:
        return config.method
    scales = method.reward_scale != "none" and "trl.scale_rewards" in given
    by_group = given.get("trl.advantage_estimator", "group" if scales else "rloo") == "group"
    return method.model_copy(update={"baseline": "group_norm" if by_group else "rloo"})


def _resolve_batch_size(config: Config) -> dict[str, int]:
    optim = config.optim
    all_unset = not (optim.micro_batch_size or optim.accumulation or optim.batch_size)
    default = group_size(config) if config.method.online else config.method.default_batch
    micro = optim.micro_batch_size or (default if all_unset else 1)
    return {"micro_batch_size": micro, "accumulation": optim.accumulation or max((optim.batch_size or 0) // micro, 1)}


def _resolve_schedule(config: Config) -> dict[str, object]:
    optim = config.optim
    if optim.cosine_min_ratio is None or optim.scheduler != "cosine":
        return {}
    args = {**optim.scheduler_args, "min_lr_rate": optim.cosine_min_ratio}
    return {"scheduler": "cosine_with_min_lr", "scheduler_args": args}


def _resolve_sharding(config: Config) -> dict[str, bool]:
    section = config.sharding
    words = section.fsdp if isinstance(section.fsdp, list) else []
    on = any(path.startswith("fsdp") for path in config.set_keys) if section.fsdp is None else bool(section.fsdp)
    # Adapters initialised from the weights, `modules_to_save`, GGUF files and quantisation need weights on every rank.
    adapter = config.adapter
    from_weights = adapter.init is not True or adapter.peft.loftq_config or adapter.modules_to_save
    from_weights = from_weights or adapter.load_in_4bit or adapter.load_in_8bit or config.model.gguf_file
    return {
        "fsdp": on,
        "low_memory_loading": section.low_memory_loading and not from_weights,
        "offload": section.offload or "offload" in words,
        "reshard": section.reshard and not {"shard_grad_op", "no_shard", "hybrid_shard_zero2"}.intersection(words),
    }
