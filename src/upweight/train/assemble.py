"""Between a loaded policy and its trainer: what runs from a config and the Python API put together alike."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from upweight.engine import Engine
from upweight.engine.check import enable_checkpointing
from upweight.engine.context import Context
from upweight.engine.noise import add_noise
from upweight.engine.offload import offload_activations
from upweight.methods.base import Method
from upweight.models.memory import USUAL_OPTIMIZER, training_bytes
from upweight.models.precision import Sharding, set_up_precision
from upweight.models.reference import Reference, adapter_state, make_reference, reference_kind
from upweight.train.budget import token_budget
from upweight.train.reference.precomputed import Precompute


def trainer_parts(
    model: PreTrainedModel | PeftModel,
    method: Method,
    dtype: torch.dtype,
    device: torch.device,
    *,
    longest: int,
    budget: int | None = None,
    optimizer: str = USUAL_OPTIMIZER,
    checkpointing: Mapping[str, Any] | None = None,
    pure: bool = False,
    separate_reference: Callable[[], nn.Module] | None = None,
    layout: Literal["auto", "tree", "padded"] = "auto",
    prepared: Path | None = None,
    sharding: Sharding = "none",
    noise: float | None = None,
    offload: bool = False,
    offload_reference: bool = False,
    context: Context | None = None,
) -> dict[str, Any]:
    """The arguments of MethodTrainer that follow from the policy.

    `optimizer`, by its name, says how much memory to leave to it. `checkpointing` holds options where it is on;
    `prepared` is where precomputed log-probs are kept. A model that will be sharded stays where it was loaded, since it
    need not fit one device. `noise` on embeddings is NEFTune's alpha; `offload` sends activations to host memory,
    `offload_reference` what a frozen copy of weights takes; the ranks of `context` share each row.
    """
    # Quantised weights are placed as they are loaded.
    if sharding == "none" and getattr(model, "hf_device_map", None) is None:
        nn.Module.to(model, device)
    copies = set_up_precision(model, dtype, sharding=sharding, pure=pure)
    install = partial(Engine, layout=layout, longest=longest, context=context)
    engine = install(model)
    precomputed = method.precomputes_reference
    reference = None
    if not precomputed:
        reference = _reference(
            model, method, dtype, device, install=install, load_separate=separate_reference, offload=offload_reference
        )
    if noise is not None:
        add_noise(model, noise)
    if offload:
        offload_activations(model)
    if checkpointing is not None:
        reentrant, every_layer = (bool(checkpointing.get(key)) for key in ("use_reentrant", "every_layer"))
        enable_checkpointing(model, reentrant, every_layer, optimizer)
    text, reserved = model.config.get_text_config(), _reserved(model, optimizer, sharding != "none")
    by_memory = token_budget(text, device, checkpointing=checkpointing is not None, reserved=reserved)
    return {
        "method": method,
        "engine": engine,
        "token_budget": budget or by_memory * (1 if context is None else context.size),
        "dtype": dtype,
        "reference": reference,
        "precompute": Precompute(separate_reference is not None, prepared) if precomputed else None,
        "copies": copies,
    }


def _reserved(model: nn.Module, optimizer: str, sharded: bool) -> int:
    """Bytes that a rank will need for gradients and the optimizer, and for its shard of the weights."""
    sizes = {parameter: getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()}
    states = training_bytes(optimizer) * sum(size for weight, size in sizes.items() if weight.requires_grad)
    if not sharded:
        return states
    weights = sum(size * parameter.element_size() for parameter, size in sizes.items())
    return (states + weights) // PartialState().num_processes


def _reference(
    policy: nn.Module,
    method: Method,
    dtype: torch.dtype,
    device: torch.device,
    *,
    install: Callable[[nn.Module], Engine],
    load_separate: Callable[[], nn.Module] | None,
    offload: bool,
) -> Reference | None:
    """The policy as it is now, or the model that `load_separate` gives, if the method compares with it."""
    synced = method.reference_sync is not None
    kind = reference_kind(
        needed=method.needs_reference, adapter=adapter_state(policy), separate=load_separate is not None, synced=synced
    )
    separate = None
    if kind == "separate" and load_separate is not None:
        separate = load_separate()
        nn.Module.to(separate, device)
        install(separate)
    return make_reference(kind, policy, dtype, synced=synced, offload=offload, separate_model=separate)
