"""Weights, gradients and optimizer states cut into shards over the ranks: FSDP2, by accelerate."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer

from upweight.config.training import ShardingSection
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.patches import shard_on_cpu
from upweight.models.precision import HALF


def is_sharded(section: ShardingSection, ranks: int) -> bool:
    """Whether a run's weights are sharded; one rank holds all of them anyway."""
    if section.fsdp and ranks == 1:
        warn_once("fsdp: there is one process, and nothing is sharded; --num-processes starts more")
    if section.fsdp and section.fsdp_version == 1:
        warn_once("fsdp_version: 1 is old; FSDP2 is taken, and trains the same")
    return bool(section.fsdp) and ranks > 1


def fsdp_arguments(section: ShardingSection) -> dict[str, Any]:
    """What TrainingArguments has to know; accelerate casts and recomputes nothing, since the engine does."""
    options: dict[str, Any] = {
        "version": 2,
        "auto_wrap_policy": section.wrap_policy,
        "reshard_after_forward": section.reshard,
        "cpu_offload": section.offload and torch.cuda.is_available(),  # elsewhere shards lie there anyway
        "state_dict_type": section.state_dict,
        "cpu_ram_efficient_loading": section.low_memory_loading,
    }
    if section.wrap_layers is not None:
        options["transformer_layer_cls_to_wrap"] = section.wrap_layers
    if section.min_parameters is not None:
        options["min_num_params"] = section.min_parameters
    return {"fsdp": True, "fsdp_config": options}


@contextlib.contextmanager
def read_once(on: bool) -> Iterator[None]:
    """Where `on`, only the first rank of each machine reads weights inside; sharding gives the others rank 0's."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING") if on else ()
    asked: dict[str, str] = dict.fromkeys(names, "true")
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def set_up_sharding(trainer: Trainer, dtype: torch.dtype) -> None:
    """Before a sharded model is prepared: the accelerator's plugin, with float32 shards that compute in `dtype`."""
    options: dict[str, Any] | None = trainer.args.fsdp_plugin_args
    if not trainer.args.fsdp or options is None:
        return
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        shard_on_cpu(state, FullyShardedDataParallelPlugin(**options))
        trainer.is_fsdp_enabled = True
    if dtype in HALF:
        assert state.fsdp_plugin is not None
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def refuse_other_layout(checkpoint: Path, sharded: bool) -> None:
    """Raise where a checkpoint's weights and this run's are not both in shards, or both whole."""
    if any(checkpoint.glob("pytorch_model_fsdp*")) == sharded:
        return
    wanted = "drop 'fsdp'" if sharded else "set 'fsdp: true' and start at least two ranks with --num-processes"
    kind = "whole" if sharded else "sharded"
    raise UserError(f"resume: the weights in {checkpoint} are {kind}; to go on from there, {wanted}.")


def shard_alone(trainer: Trainer) -> None:
    """Shard a model that is evaluated and never trained: accelerate prepares only those with an optimizer."""
    if trainer.is_fsdp_enabled:
        assert isinstance(trainer.model, nn.Module)
        trainer.model = trainer.model_wrapped = fsdp2_prepare_model(trainer.accelerator, trainer.model)
