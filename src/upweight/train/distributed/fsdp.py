"""FSDP2 through accelerate: weights, gradients and optimizer states sharded over the ranks."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, patch_environment
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import Trainer

from upweight.config.sections.training import ShardingSection
from upweight.engine import Engine
from upweight.engine.images import with_blank_image
from upweight.engine.packing import build_batch
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.patches import shard_on_cpu
from upweight.models.precision import HALF_DTYPES, Sharding
from upweight.models.shards import any_sharded, gathered_from_zero3


def build_sharding(section: ShardingSection, ranks: int) -> Sharding:
    """Return how a run's weights are sharded; FSDP with one rank shards nothing."""
    if section.deepspeed is not None:
        return "deepspeed"
    shards = section.fsdp and (ranks > 1 or dist.is_initialized())  # one rank of one: it resumes from shards
    if section.fsdp and not shards:
        warn_once("fsdp: there is one process, and nothing is sharded; start more (--num-processes, torchrun)")
    if section.fsdp and section.fsdp_version == 1:
        warn_once("fsdp_version: 1 is old; FSDP2 is taken, and trains the same")
    return "fsdp" if shards else "none"


def fsdp_arguments(section: ShardingSection) -> dict[str, Any]:
    """Return the TrainingArguments of FSDP; the engine does mixed precision and checkpointing, not accelerate."""
    options: dict[str, Any] = {
        "version": 2,
        "auto_wrap_policy": section.wrap_policy,
        "reshard_after_forward": section.reshard,
        "cpu_offload": section.offload and torch.cuda.is_available(),  # without a GPU, shards are on the CPU anyway
        "state_dict_type": section.state_dict,
        "cpu_ram_efficient_loading": section.low_memory_loading,
        "transformer_layer_cls_to_wrap": section.wrap_layers,
        "min_num_params": section.min_parameters,
    }
    return {"fsdp": True, "fsdp_config": {name: value for name, value in options.items() if value is not None}}


def rank0_reads_weights(on: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, if `on`, only the first rank of each machine reads weights; sharding broadcasts rank 0's."""
    variables = dict.fromkeys(("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"), "true")
    return patch_environment(**variables if on else {})


def set_up_sharding(trainer: Trainer, dtype: torch.dtype) -> None:
    """Set up the accelerator's FSDP plugin with float32 shards that compute in `dtype`."""
    options: dict[str, Any] | None = trainer.args.fsdp_plugin_args
    if not trainer.args.fsdp or options is None:
        return
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        shard_on_cpu(state, FullyShardedDataParallelPlugin(**options))
        trainer.is_fsdp_enabled = True
    assert state.fsdp_plugin is not None
    assert trainer.model is not None
    if state.fsdp_plugin.transformer_cls_names_to_wrap is None:
        # A vision model may name layers of the text model that its tower came with, which it has not.
        classes = {type(module).__name__ for module in trainer.model.modules()}
        named = getattr(trainer.model, "_no_split_modules", None) or ()
        state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(classes.intersection(named))
    if dtype in HALF_DTYPES:
        # Inputs stay as they are, as on one rank: counts of tokens, cast to bfloat16, would be rounded above 256.
        state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def layout_of(checkpoint: Path) -> Sharding:
    """Return how the weights of a checkpoint are sharded."""
    if any(checkpoint.glob("pytorch_model_fsdp*")):
        return "fsdp"
    return "deepspeed" if any(checkpoint.glob("global_step*")) else "none"


def refuse_other_layout(checkpoint: Path, sharding: Sharding) -> None:
    """Raise where a checkpoint is sharded in another way than this run."""
    layouts: dict[Sharding, tuple[str, str]] = {
        "fsdp": ("sharded by FSDP", "set 'fsdp: true'"),
        "deepspeed": ("partitioned by DeepSpeed", "set 'deepspeed' as it was"),
        "none": ("whole", "drop fsdp and deepspeed"),
    }
    if (layout := layout_of(checkpoint)) != sharding:
        kind, remedy = layouts[layout]
        raise UserError(f"resume: the weights in {checkpoint} are {kind}; to go on from there, {remedy}.")


@contextlib.contextmanager
def whole_weights(model: nn.Module, engine: Engine) -> Iterator[None]:
    """Inside, every rank holds all weights, and modules run without the hooks that gather; all ranks enter together."""
    if isinstance(model, FSDPModule):
        plugin, device = AcceleratorState().fsdp_plugin, PartialState().device
        assert plugin is not None
        assert device is not None
        model.set_reshard_after_forward(False)
        try:
            with torch.no_grad():  # a forward through the root gathers unit by unit, and prepares what gathers
                batch = build_batch([], engine.layout).to(device)
                engine(model, batch if engine.images is None else with_blank_image(batch))
            with _without_hooks(model):
                yield
        finally:
            model.set_reshard_after_forward(bool(plugin.reshard_after_forward))
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    elif any_sharded(model):
        with gathered_from_zero3(list(model.parameters())), _without_hooks(model):
            yield
    else:
        yield


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, no forward hook of any module runs; they could not be recorded in a CUDA graph either."""
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in model.modules()]
    for module, _, _ in kept:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
