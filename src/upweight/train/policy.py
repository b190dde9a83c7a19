"""The policy: the model that is trained, with its precision, its engine and the reference it is compared with."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from upweight.config import Config
from upweight.config.sections.training import OptimSection
from upweight.config.zero import partitions_weights
from upweight.engine import Engine
from upweight.engine.check import enable_checkpointing
from upweight.engine.context import Context
from upweight.engine.noise import add_noise
from upweight.engine.offload import offload_activations
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.models.adapters.attach import attach_adapter, new_adapter
from upweight.models.load import disable_dropout, fit_vocabulary, load_model, master_dtype
from upweight.models.memory import activation_bytes, training_bytes
from upweight.models.precision import ComputeCopies, Sharding, set_up_precision
from upweight.models.reference import Reference, adapter_state, make_reference, reference_kind
from upweight.train.distributed.deepspeed import zero3_partitioned_loading, zero_config
from upweight.train.distributed.fsdp import rank0_reads_weights
from upweight.train.objects import Model, Objects
from upweight.train.reference.precomputed import Precompute

ON_CPU = 4096  # tokens of one forward, unless a budget is set
SMALLEST_BUDGET, LARGEST_BUDGET = 2048, 65_536
FREE_SHARE = 0.5  # of the memory that is free once the weights are loaded


@dataclass(frozen=True)
class Policy:
    """What computes: the model ready to be trained, and what it is compared with."""

    model: Any
    method: Method
    engine: Engine
    token_budget: int
    dtype: torch.dtype  # that forwards compute in
    reference: Reference | None = None
    precompute: Precompute | None = None
    copies: ComputeCopies | None = None
    tokenizer: Any = None  # None where tokens are all there is
    offload_reference: bool = False
    sharding: Sharding = "none"

    @property
    def sharded(self) -> bool:
        """Whether the ranks hold shards of the weights, or will: gathered for a rollout, sent in pieces to a server."""
        return self.sharding != "none"


def load_policy(
    config: Config,
    objects: Objects,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    sharding: Sharding,
    *,
    trains: bool,
) -> Model:
    """The model to train: loaded or handed over, dropout as the method wants it, adapted or partly frozen."""
    set_seed(config.optim.seed)  # of an adapter's first weights, where no model is loaded before
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
    if objects.peft_config is not None:
        model = new_adapter(model, objects.peft_config)
    elif config.adapter.kind is not None and objects.model is None:
        model = attach_adapter(model, config.adapter, new_tokens=len(config.model.new_tokens))  # pyright: ignore
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: no weight is trained. Load an adapter with `is_trainable=True`.")
    return model


def _load_base_model(
    config: Config,
    objects: Objects,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    sharding: Sharding,
    *,
    trains: bool,
) -> Model:
    """The config's model on the CPU; only what is trained next may be loaded in the pieces that ranks will hold."""
    sparing, zero = config.sharding.low_memory_loading, config.sharding.deepspeed
    cut = zero_config(zero, config.folder, dtype) if zero and partitions_weights(zero, config.folder) else None
    compared = config.method.online and config.rollout.use_vllm  # rank 0 compares whole weights with a server's
    in_pieces = cut if sparing and trains and not compared else None
    masters = trains and config.adapter.kind is None and not config.model.pure_bf16 and sharding != "deepspeed"
    wanted = objects.load_dtype or (master_dtype(config.model, dtype) if masters else dtype)
    with rank0_reads_weights(sparing and sharding == "fsdp"), zero3_partitioned_loading(in_pieces):
        return load_model(
            config.model,
            wanted,
            head=config.method.head,
            tokenizer=tokenizer if objects.chat_template_path is None else None,
            adapter=config.adapter,
            seed=config.optim.seed,
        )


def _add_template_tokens(model: Model, config: Config, objects: Objects, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokens that came with a chat template their embeddings, where these will be trained."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    new = len(tokenizer) - embedding.num_embeddings
    if new <= 0:
        return
    adapter = objects.peft_config
    if isinstance(model, PeftModel) or (adapter and not getattr(adapter, "modules_to_save", None)):
        raise UserError(
            f"chat_template_path: the model does not know {new} of its tokens, and the adapter would not train them. "
            "Name the modules of the embeddings in `modules_to_save` of the peft_config, or train without an adapter."
        )
    fit_vocabulary(model, tokenizer, config.model)


def freeze_all_but(model: nn.Module, patterns: list[str]) -> None:
    """Train only the parameters whose names match one of the patterns from their beginning."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.match(pattern, name) for name in names):
            raise UserError(f"unfrozen_parameters: '{pattern}' matches no weight; names look like {names[0]}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))


def make_policy(
    model: Any,
    method: Method,
    dtype: torch.dtype,
    device: torch.device,
    *,
    longest: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    optim: OptimSection,
    pure: bool = False,
    separate_reference: Callable[[], nn.Module] | None = None,
    layout: Literal["auto", "tree", "padded"] = "auto",
    prepared: Path | None = None,
    sharding: Sharding = "none",
    context: Context | None = None,
) -> Policy:
    """A model on its device, in its precision, under the engine, with its reference.

    `optim` says what saves memory and how much of it the optimizer takes; `prepared` is where precomputed log-probs are
    kept. A model that will be sharded stays where it was loaded, since it need not fit one device. The ranks of
    `context` share each row.
    """
    # Quantised weights are placed as they are loaded.
    if sharding == "none" and getattr(model, "hf_device_map", None) is None:
        nn.Module.to(model, device)
    copies = set_up_precision(model, dtype, sharding=sharding, pure=pure)
    install = partial(Engine, layout=layout, longest=longest, context=context)
    engine = install(model)
    precomputed = method.precomputes_reference
    separate = (
        None if separate_reference is None else partial(_load_separate_reference, separate_reference, device, install)
    )
    reference = None
    if not precomputed:
        reference = _make_policy_reference(model, method, dtype, separate, offload=optim.reference_offloading)
    if optim.neftune_alpha is not None:
        add_noise(model, optim.neftune_alpha)
    if optim.activation_offloading:
        offload_activations(model)
    if optim.gradient_checkpointing:
        reentrant, every_layer = (bool(optim.checkpointing_args.get(key)) for key in ("use_reentrant", "every_layer"))
        enable_checkpointing(model, reentrant, every_layer, optim.optimizer)
    text, reserved = model.config.get_text_config(), _reserved_bytes(model, optim.optimizer, sharding != "none")
    by_memory = token_budget(text, device, checkpointing=optim.gradient_checkpointing, reserved=reserved)
    return Policy(
        model,
        method,
        engine,
        optim.token_budget or by_memory * (1 if context is None else context.size),
        dtype,
        reference,
        Precompute(adapter_state(model) == "identity", prepared, separate) if precomputed else None,
        copies,
        tokenizer,
        optim.reference_offloading,
        sharding,
    )


def _load_separate_reference(
    load: Callable[[], nn.Module], device: torch.device, install: Callable[[nn.Module], Engine]
) -> nn.Module:
    """Another model than the policy, on its device under an engine of its own."""
    model = load()
    nn.Module.to(model, device)
    install(model)
    return model


def token_budget(config: PreTrainedConfig, device: torch.device, *, checkpointing: bool, reserved: int) -> int:
    """Tokens whose activations fit into the device's free memory, but for the bytes `reserved`."""
    if device.type != "cuda":
        return ON_CPU
    free = torch.cuda.mem_get_info(device)[0] - reserved
    tokens = int(FREE_SHARE * free / activation_bytes(config, checkpointing=checkpointing))
    return min(max(tokens // 128 * 128, SMALLEST_BUDGET), LARGEST_BUDGET)


def _reserved_bytes(model: nn.Module, optimizer: str, sharded: bool) -> int:
    """Bytes that a rank will need for gradients and the optimizer, and for its shard of the weights."""
    sizes = {parameter: getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()}
    states = training_bytes(optimizer) * sum(size for weight, size in sizes.items() if weight.requires_grad)
    if not sharded:
        return states
    weights = sum(size * parameter.element_size() for parameter, size in sizes.items())
    return (states + weights) // PartialState().num_processes


def _make_policy_reference(
    policy: nn.Module,
    method: Method,
    dtype: torch.dtype,
    load_separate: Callable[[], nn.Module] | None,
    *,
    offload: bool,
) -> Reference | None:
    """The policy as it is now, or the model that `load_separate` gives, if the method compares with it."""
    synced = method.reference_sync is not None
    kind = reference_kind(
        needed=method.needs_reference, adapter=adapter_state(policy), separate=load_separate is not None, synced=synced
    )
    separate = load_separate() if kind == "separate" and load_separate is not None else None
    return make_reference(kind, policy, dtype, synced=synced, offload=offload, separate_model=separate)
