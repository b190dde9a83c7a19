"""Fills in values that follow from other keys."""

import dataclasses
from math import lcm

from upweight.config.config import Config
from upweight.config.sections.data import DatasetSpec
from upweight.methods import feature_matcher
from upweight.methods.base import Method


def resolve(config: Config) -> Config:
    """Return the config with every derived value filled in."""
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
    micro = optim.micro_batch_size or (group_size(config) if all_unset else 1)
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
