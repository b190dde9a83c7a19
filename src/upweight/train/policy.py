"""The policy: the model that is trained, with its precision, engine and reference model."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, set_seed

from upweight.config import Config
from upweight.config.sections.model import ModelSection
from upweight.config.sections.training import OptimSection
from upweight.config.servers import direct_transfer
from upweight.config.zero import zero_stage
from upweight.engine import Engine
from upweight.engine.activations import add_noise, enable_checkpointing, offload_activations
from upweight.engine.context_parallel import ContextGroup
from upweight.errors import UserError, closest
from upweight.log import logger
from upweight.methods.base import Method
from upweight.models.adapters.attach import attach_adapter, new_adapter
from upweight.models.adapters.merge import AdapterFolder
from upweight.models.kernels.tiled_mlp import tile_blocks
from upweight.models.load import disable_dropout, fit_vocabulary, load_model, master_dtype
from upweight.models.memory import FORWARD_SHARE, Savings, TokenBytes, free_memory, training_bytes
from upweight.models.modules import unwrap_peft
from upweight.models.precision import ComputeCopies, Sharding, set_up_precision
from upweight.models.processor import image_reader
from upweight.models.reference import Reference, adapter_state, make_reference, reference_kind
from upweight.models.vision import freeze_vision, vision_family, vision_module_names
from upweight.train.distill.teachers import Teachers
from upweight.train.distributed.deepspeed import zero3_partitioned_loading, zero_config
from upweight.train.distributed.fsdp import rank0_reads_weights
from upweight.train.experts.balance import router_coefficient
from upweight.train.experts.blocks import refuse_units_of_experts, set_up_experts
from upweight.train.objects import Model, Objects, Tokenizer
from upweight.train.reference import LoadModel, Precompute

# From the policy and its engine, and a function that gives other models an engine.
LoadTeachers = Callable[[nn.Module, Engine, Callable[[nn.Module], Engine]], Teachers]
CPU_TOKEN_BUDGET = 4096  # token budget of one forward on CPU, unless it is set
MIN_AUTO_BUDGET, LARGEST_BUDGET = 2048, 65_536
LEAN_BUDGET = 10_240  # larger rows take more memory and gain little speed


@dataclass(frozen=True)
class Policy:
    """The model that is ready to train, with its engine and its reference."""

    model: Any
    method: Method
    engine: Engine
    token_budget: int
    dtype: torch.dtype  # that forwards compute in
    reference: Reference | None = None
    precompute: Precompute | None = None
    teachers: Teachers | None = None
    copies: ComputeCopies | None = None
    tokenizer: Any = None  # None where rows are tokenized already
    offload_reference: bool = False
    sharding: Sharding = "none"
    reserved: int = 0  # bytes that the first step will allocate for gradients and the optimizer
    router_coefficient: float = 0.0  # of the load-balancing loss of a mixture of experts

    @property
    def sharded(self) -> bool:
        """Whether the ranks hold shards of the weights, now or once training begins."""
        return self.sharding != "none"


def load_policy(
    config: Config, objects: Objects, tokenizer: Tokenizer, dtype: torch.dtype, sharding: Sharding, *, trains: bool
) -> Model:
    """Return the model to train: loaded or passed by a script, with dropout, adapter and frozen weights set up."""
    set_seed(config.optim.seed)  # for the initial adapter weights of a model that a script passes
    model = objects.model
    if model is None:
        model = _load_base_model(config, objects, tokenizer, dtype, sharding, trains=trains)
    if objects.chat_template_path is not None:
        _add_template_tokens(model, config, objects, tokenizer)
    if objects.model is not None and tokenizer.pad_token_id is not None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    off = config.model.disable_dropout
    if off or (off is None and not config.method.keeps_dropout):
        disable_dropout(model)
    if config.optim.unfrozen is not None:
        freeze_all_but(model, config.optim.unfrozen)
    frozen_vision = _freeze_vision(model, config)
    if objects.peft_config is not None:
        model = new_adapter(model, objects.peft_config)
    elif config.adapter.kind is not None and objects.model is None:
        new_tokens = len(config.model.new_tokens)
        model = attach_adapter(model, config.adapter, new_tokens=new_tokens, excluded=frozen_vision)  # pyright: ignore
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no weight is trained. Load an adapter with `is_trainable=True`.")
    if sharding == "fsdp":
        refuse_units_of_experts(model, config.sharding.wrap_layers)
    return model


def _freeze_vision(model: Model, config: Config) -> str | None:
    """Freeze the vision tower and projector where the settings say so; return a pattern of their names."""
    asked = config.model.freeze_vision
    if vision_family(model.config) is None:
        keys = {"freeze_vision": asked is not None, "processor_type": config.model.processor_class is not None}
        keys["processor_kwargs"] = bool(config.model.processor_options)
        if given := [key for key, is_set in keys.items() if is_set]:
            raise UserError(f"{given[0]}: the model reads no images. Leave it out.")
        return None
    if not (config.adapter.kind is not None if asked is None else asked):
        return None
    if asked is None:
        logger.info(
            "freeze_vision: only the language model gets an adapter; `freeze_vision: false` adapts the tower too"
        )
    return freeze_vision(unwrap_peft(model))


def _load_base_model(
    config: Config, objects: Objects, tokenizer: Tokenizer, dtype: torch.dtype, sharding: Sharding, *, trains: bool
) -> Model:
    """Load the config's model on the CPU; with `trains`, ZeRO-3 may load it as shards."""
    low_memory, zero = config.sharding.low_memory_loading, config.sharding.deepspeed
    zero_options = zero_config(zero, config.folder, dtype) if zero is not None else {}
    # Rank 0 compares the model's log-probs with those of a vLLM server, which needs all weights.
    with_vllm = config.method.online and config.rollout.use_vllm
    shard_config = zero_options if zero_stage(zero_options) == 3 and low_memory and trains and not with_vllm else None
    masters = trains and config.adapter.kind is None and not config.model.pure_bf16 and sharding != "deepspeed"
    weight_dtype = objects.load_dtype or (master_dtype(config.model, dtype) if masters else dtype)
    fitted, seed = tokenizer if objects.chat_template_path is None else None, config.optim.seed
    with rank0_reads_weights(low_memory and sharding == "fsdp"), zero3_partitioned_loading(shard_config):
        return load_model(
            config.model,
            weight_dtype,
            head=config.method.head,
            tokenizer=fitted,
            adapter=config.adapter,
            seed=seed,
            head_follows=_brings_head(config),
        )


def _brings_head(config: Config) -> bool:
    """Return whether the adapter that a config begins with holds a score head as the method trains one."""
    folder = Path(config.adapter.folder or "")
    if config.method.head == "tokens" or not (folder / "adapter_config.json").is_file():
        return False
    with suppress(ValueError):  # of a damaged file, which is said where it is loaded
        return AdapterFolder(config.model, folder).head() == config.method.head
    return False


def _add_template_tokens(model: Model, config: Config, objects: Objects, tokenizer: Tokenizer) -> None:
    """Resize the embeddings for the new tokens of a chat template; refuse it where they would not be trained."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    new = len(tokenizer) - embedding.num_embeddings
    if new <= 0:
        return
    adapter = objects.peft_config
    if isinstance(model, PeftModel) or (adapter and not getattr(adapter, "modules_to_save", None)):
        remedy = "To train them, name the embeddings in `modules_to_save` of the peft_config, or use no adapter."
        raise UserError(f"chat_template_path: the model does not know {new} of its tokens. {remedy}")
    fit_vocabulary(model, tokenizer, config.model)


def freeze_all_but(model: nn.Module, patterns: list[str]) -> None:
    """Train only the parameters whose names match one of the patterns from their beginning."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            near = closest(pattern, names, cutoff=0.3) or names[0]
            raise UserError(f"unfrozen_parameters: '{pattern}' matches no weight; names look like {near}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))


def make_policy(
    model: Any,
    method: Method,
    dtype: torch.dtype,
    device: torch.device,
    *,
    longest: int,
    tokenizer: Tokenizer | None = None,
    optim: OptimSection,
    section: ModelSection,
    separate_reference: LoadModel | None = None,
    load_teachers: LoadTeachers | None = None,
    prepared: Path | None = None,  # caches precomputed reference log-probs
    sharding: Sharding = "none",
    context: ContextGroup | None = None,  # ranks that share each row
) -> Policy:
    """Place the model on its device, set up precision, engine, memory savings and reference, and return the policy."""
    coefficient = router_coefficient(unwrap_peft(model), method, optim)
    # Quantised weights are placed as they are loaded; a model that will be sharded may not fit one device.
    if sharding == "none" and getattr(model, "hf_device_map", None) is None:
        nn.Module.to(model, device)
    copies = set_up_precision(model, dtype, sharding=sharding, pure=section.pure_bf16)
    set_up_experts(model, sharding)
    images = image_reader(tokenizer)
    attach_engine = partial(
        Engine, layout=section.layout, longest=longest, context=context, images=images, head_chunk=optim.head_chunk
    )
    engine = attach_engine(model)
    precomputed, load = method.precomputes_reference, None
    if separate_reference is not None:
        load = partial(_load_separate, separate_reference, device, attach_engine)
    reference = None if precomputed else _reference(model, method, dtype, load, offload=optim.reference_offloading)
    teachers = None if load_teachers is None else load_teachers(model, engine, attach_engine)
    _save_activations(model, optim, whole=sharding == "none" and context is None)
    text, reserved = model.config.get_text_config(), _reserved_bytes(model, optim.optimizer, sharding != "none")
    by_memory = token_budget(text, device, optim, reserved=reserved)
    shares = 1 if context is None else context.size  # of a row
    budget = optim.token_budget or by_memory * shares
    if optim.tiled_mlp:
        _tile_blocks(model, budget // shares, optim)
    precompute = Precompute(adapter_state(model) == "identity", prepared, load) if precomputed else None
    references = {"reference": reference, "precompute": precompute, "offload_reference": optim.reference_offloading}
    return Policy(
        model,
        method,
        engine,
        budget,
        dtype,
        copies=copies,
        tokenizer=tokenizer,
        sharding=sharding,
        teachers=teachers,
        router_coefficient=coefficient,
        reserved=reserved,
        **references,
    )


def _save_activations(model: nn.Module, optim: OptimSection, *, whole: bool) -> None:
    """Set up noise on embeddings, offloading and recomputation; `whole`: weights and rows are not shared by ranks."""
    if optim.neftune_alpha is not None:
        add_noise(model, optim.neftune_alpha)
    if optim.activation_offloading:
        offload_activations(model)
    if optim.gradient_checkpointing:
        options = optim.checkpointing_args
        reentrant, every_layer = bool(options.get("use_reentrant")), bool(options.get("every_layer"))
        enable_checkpointing(model, reentrant, every_layer, optim.optimizer, keep=options.get("keep"), one_node=whole)


def _tile_blocks(model: nn.Module, above: int, optim: OptimSection) -> None:
    """Tile the gated blocks of rows with more than `above` tokens; refuse a model without any, if it was asked for."""
    if not tile_blocks(unwrap_peft(model), above) and optim.memory != "lean":
        raise UserError("tiled_mlp: the model has no gated blocks (gate_proj, up_proj, down_proj). Leave it out.")


def _load_separate(load: LoadModel, device: torch.device, attach_engine: Callable[[nn.Module], Engine]) -> nn.Module:
    """Load a reference model that is not the policy, on the device, with an engine."""
    model = load()
    nn.Module.to(model, device)
    attach_engine(model)
    return model


def token_budget(config: PreTrainedConfig, device: torch.device, optim: OptimSection, *, reserved: int) -> int:
    """Return how many tokens' activations fit into the device's free memory minus `reserved` bytes."""
    if device.type != "cuda":
        return CPU_TOKEN_BUDGET
    free = free_memory(device) - reserved
    keep = optim.checkpointing_args.get("keep")  # rows are then as large as all their activations fit
    share, savings = (FORWARD_SHARE, Savings.by(optim)) if keep is None else (keep, Savings())
    tokens = int(share * free / TokenBytes.of(config).peak(savings))
    largest = LEAN_BUDGET if optim.memory == "lean" or optim.activation_offloading else LARGEST_BUDGET
    return min(max(tokens // 128 * 128, MIN_AUTO_BUDGET), largest)


def _reserved_bytes(model: nn.Module, optimizer: str, sharded: bool) -> int:
    """Return the bytes that a rank needs for gradients, optimizer states and its shard of the weights."""
    sizes = {parameter: getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()}
    states = training_bytes(optimizer) * sum(size for weight, size in sizes.items() if weight.requires_grad)
    if not sharded:
        return states
    weights = sum(size * parameter.element_size() for parameter, size in sizes.items())
    return (states + weights) // PartialState().num_processes


def _reference(
    model: nn.Module, method: Method, dtype: torch.dtype, load: LoadModel | None, *, offload: bool
) -> Reference | None:
    """Return the reference of the method, if it needs one: the initial policy or the separate model of `load`."""
    synced, adapter = method.reference_sync is not None, adapter_state(model)
    kind = reference_kind(needed=method.needs_reference, adapter=adapter, separate=load is not None, synced=synced)
    separate = load() if kind == "separate" and load is not None else None
    return make_reference(kind, model, dtype, synced=synced, offload=offload, separate_model=separate)


def image_problems(config: Config, model: Model, ranks: int) -> Iterator[str]:
    """Yield what is wrong with settings with which images are not trained on."""
    if config.sharding.context_parallel_size > 1:
        yield "context_parallel_size: rows with images are not shared by ranks; set it to 1."
    if config.optim.neftune_alpha is not None:
        yield "neftune_noise_alpha: noise is not added to rows with images; leave it out."
    if config.optim.activation_offloading and config.optim.memory != "lean":  # which leaves it out for them
        yield "activation_offloading: it does not cover rows with images; leave it out."
    if config.method.computed_rewards and (config.sharding.fsdp or config.sharding.deepspeed is not None):
        problem = "features of rows with images are computed with whole weights"
        yield f"fsdp, deepspeed: {problem}; leave it out, or use another method than {config.method.name}."
    if config.method.online and config.rollout.use_vllm:
        yield from _problems_with_vllm(config)
    if config.method.online and config.rollout.rollout_backend:
        yield "trl.rollout_backend: a backend of yours gets no images; leave it out, or write a trl.rollout_func."
    if ranks > 1 and config.optim.checkpointing_args.get("use_reentrant") and trains_vision(model):
        problem = "a rank whose rows have no image leaves the vision tower without gradients, which it hides"
        yield f"gradient_checkpointing_kwargs: use_reentrant: {problem}; set it to false, or 'freeze_vision: true'."


def _problems_with_vllm(config: Config) -> Iterator[str]:
    """Yield what is wrong with settings with which vLLM gets no images."""
    here = "leave out trl.use_vllm to sample in this process"
    if config.sharding.fsdp or config.sharding.deepspeed is not None:
        yield f"fsdp, deepspeed: sharded weights are not compared with vLLM's after images; {here}."
    if config.rollout.vllm_mode != "colocate" and direct_transfer(config) is not None:
        yield "trl.vllm_weight_transfer: the weights of a vision model are sent through a folder alone; use 'folder'."


def trains_vision(model: Model) -> bool:
    """Return whether weights that only images go through are trained."""
    base = unwrap_peft(model)
    return any(p.requires_grad for name in vision_module_names(base) for p in base.get_submodule(name).parameters())
