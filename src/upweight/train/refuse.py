"""What a config may say and a run cannot do yet: named together, before anything is loaded."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import torch

from upweight.config import Config
from upweight.config.sections.training import OptimizerName
from upweight.errors import UserError
from upweight.runs.files import no_folder_at
from upweight.serve.command import LOOPBACK, direct_transfer, server_urls
from upweight.train.distributed.deepspeed import partitions_weights
from upweight.train.online.vllm import NEEDS_GPU, NO_LOOPBACK, NO_PATTERN, NO_SHARDS, NO_VLLM, ONE_PROCESS
from upweight.train.reference.precomputed import refuse_inexact
from upweight.train.reference.synced import sync_settings

FROM_BITSANDBYTES = {"adamw_8bit", "ademamix", "lion", *(name for name in get_args(OptimizerName) if "bnb" in name)}
FROM_BITSANDBYTES |= {name for name in get_args(OptimizerName) if name.startswith(("paged_", "lion_", "ademamix_"))}


OPTIMIZER_PACKAGES: dict[str, str] = {  # what pip calls them
    **dict.fromkeys(FROM_BITSANDBYTES, "bitsandbytes"),
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "torchao"),
    **{name: "schedulefree" for name in get_args(OptimizerName) if name.startswith("schedule_free")},
    "stable_adamw": "torch-optimi",
}


def _shards(config: Config) -> bool:
    """Whether ranks share weights, gradients or optimizer states."""
    return bool(config.sharding.fsdp) or config.sharding.deepspeed is not None


def _hands_over(config: Config) -> str | None:
    """How all weights reach a server without a folder, where they do."""
    by_server = config.method.online and config.rollout.use_vllm and config.rollout.vllm_mode == "server"
    return direct_transfer(config) if by_server else None


def _cuts_weights(config: Config) -> bool:
    """Whether ranks may hold a piece of each weight."""
    return bool(config.sharding.fsdp) or partitions_weights(config.sharding.deepspeed, config.folder)


UNSUPPORTED: tuple[tuple[str, Callable[[Config], object], str], ...] = (
    (
        "load_in_8bit",
        lambda c: _cuts_weights(c) and c.adapter.load_in_8bit,
        "integers cannot be sharded, and their scales would be lost; use 'load_in_4bit: true', ZeRO-1 or 2, or drop "
        "fsdp and deepspeed: each GPU then holds all weights, half as large",
    ),
    (
        "bnb_config_kwargs.bnb_4bit_quant_storage",
        lambda c: _cuts_weights(c) and "bnb_4bit_quant_storage" in c.adapter.quantisation,
        "shards of 4-bit weights have to lie in the dtype of the computation; drop the key",
    ),
    (
        "rl_adapter_ref_model",
        lambda c: _shards(c) and c.adapter.separate_reference,
        "a second model would not be sharded; drop the key: the reference is the adapter switched off",
    ),
    (
        "precompute_ref_log_probs",
        lambda c: _shards(c) and getattr(c.method, "precompute_ref_log_probs", False),
        "weights are sharded only when training begins; drop the key: the reference is sharded too",
    ),
    (
        "fsdp, deepspeed, fp16",
        lambda c: _shards(c) and c.model.fp16,
        "sharded weights are computed in bfloat16 or float32; use 'bf16: true'",
    ),
    (
        "optimizer",
        lambda c: c.sharding.fsdp and c.optim.optimizer in FROM_BITSANDBYTES,
        "bitsandbytes does not know shards; use 'adamw_torch_8bit' or 'adamw_torch_fused'",
    ),
    (
        "save_only_model",
        lambda c: c.sharding.fsdp and c.run.save_only_model and c.sharding.state_dict == "SHARDED_STATE_DICT",
        "needs whole weights; set 'fsdp_config.state_dict_type: FULL_STATE_DICT'",
    ),
    (
        "fsdp_config.auto_wrap_policy",
        lambda c: c.sharding.fsdp and c.sharding.wrap_policy == "SIZE_BASED_WRAP",
        "accelerate does not shard by size under FSDP2; use TRANSFORMER_BASED_WRAP, or drop the key",
    ),
    (
        "fsdp_config.final_state_dict_type",
        lambda c: c.sharding.fsdp and c.sharding.final_state_dict != "FULL_STATE_DICT",
        "the result is always written whole; drop the key",
    ),
    (
        "gradient_checkpointing_kwargs",
        lambda c: set(c.optim.checkpointing_args) - {"use_reentrant", "every_layer"},
        "only 'use_reentrant' and 'every_layer' are known",
    ),
    (
        "torch_compile",
        lambda c: c.optim.torch_compile,
        "layers are not compiled, since rows differ in their trees; attention and head are. Drop the key",
    ),
    (
        "activation_offloading",
        lambda c: c.optim.activation_offloading and _shards(c),
        "gathered weights would be taken for activations; drop it, or fsdp and deepspeed",
    ),
    (
        "reference_offloading",
        lambda c: c.optim.reference_offloading and (_shards(c) or c.adapter.separate_reference),
        "is for a copy of weights that lie whole on one device; drop it, or fsdp, deepspeed and rl_adapter_ref_model",
    ),
    (
        "sync_ref_model",
        lambda c: c.sharding.deepspeed is not None and sync_settings(c.method) is not None,
        "a reference that follows is not kept by DeepSpeed's checkpoints; use 'fsdp: true' instead of deepspeed",
    ),
    (
        "deepspeed, context_parallel_size",
        lambda c: c.sharding.deepspeed is not None and c.sharding.context_parallel_size > 1,
        "ranks that share rows are not known to DeepSpeed; use 'fsdp: true' instead",
    ),
    (
        "trl.vllm_lora_sync",
        lambda c: _shards(c) and c.method.online and c.adapter.kind and c.rollout.lora_sync is False,
        "an adapter cannot be merged into sharded weights; drop the key, and the adapter alone is sent",
    ),
    (
        "neftune_noise_alpha",
        lambda c: c.optim.neftune_alpha and c.method.name != "sft",
        "noise on embeddings is for supervised fine-tuning: elsewhere it would come between policy and reference. "
        "Drop the key",
    ),
    (
        "fp16",
        lambda c: c.model.fp16 and not torch.cuda.is_available(),
        "float16 with loss scaling needs a CUDA device, and none is visible; drop the key or use 'bf16: true'",
    ),
    (
        "unfrozen_parameters",
        lambda c: c.optim.unfrozen and c.adapter.kind,
        "chooses among all weights, but 'adapter' trains its own; use 'lora_modules_to_save'",
    ),
)

ONLINE: tuple[tuple[str, Callable[[Config], object], str], ...] = (
    (
        "trl.vllm_mode",
        lambda c: _shards(c) and c.method.online and c.rollout.use_vllm and c.rollout.vllm_mode == "colocate",
        ONE_PROCESS,
    ),
    ("trl.vllm_weight_transfer", lambda c: _hands_over(c) and not torch.cuda.is_available(), NEEDS_GPU),
    ("trl.vllm_weight_transfer", lambda c: _hands_over(c) and _shards(c), NO_SHARDS),
    (
        "trl.vllm_weight_transfer",
        lambda c: (
            _hands_over(c) == "ipc" and not {urlsplit(url).hostname for url in server_urls(c.rollout)} <= {*LOOPBACK}
        ),
        NO_LOOPBACK,
    ),
    ("trl.vllm_weight_transfer", lambda c: _hands_over(c) == "nccl" and find_spec("vllm") is None, NO_VLLM),
    (
        "trl.vllm_structured_outputs_regex",
        lambda c: c.method.online and c.rollout.regex is not None and not c.rollout.use_vllm,
        NO_PATTERN,
    ),
)


def require_optimizer(name: str) -> None:
    """Raise where the package that an optimizer comes from is not installed."""
    package = OPTIMIZER_PACKAGES.get(name)
    if package is not None and find_spec("optimi" if package == "torch-optimi" else package) is None:
        raise UserError(f"optimizer: {name} needs a package: pip install {package}.")


def refuse_unsupported(config: Config) -> None:
    """Raise for everything in a config that would otherwise have no effect or fail late."""
    refused = [f"{key}: {text}." for key, asked, text in (*UNSUPPORTED, *ONLINE) if asked(config)]
    if (reason := no_folder_at(Path(config.run.output_dir))) is not None:
        refused.append(f"output_dir: {reason}. Name another folder.")
    if refused:
        raise UserError("\n".join(refused))
    if getattr(config.method, "precompute_ref_log_probs", False):
        refuse_inexact(config.method)
