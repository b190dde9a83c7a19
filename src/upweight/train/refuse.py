"""What a config may say and a run cannot do yet: named together, before anything is loaded."""

from collections.abc import Callable

import torch

from upweight.config import Config
from upweight.errors import UserError
from upweight.train.reference_rows import refuse_inexact

UNSUPPORTED: tuple[tuple[str, Callable[[Config], object], str], ...] = (
    (
        "fsdp",
        lambda c: any(path.startswith("fsdp") for path in c.given),
        "weights cannot be sharded yet; plain data parallelism starts by itself",
    ),
    ("deepspeed", lambda c: c.sharding.deepspeed, "DeepSpeed is not supported yet; drop the key"),
    (
        "context_parallel_size",
        lambda c: c.sharding.context_parallel_size > 1,
        "rows cannot be shared by ranks yet; set it to 1 and lower 'sequence_len'",
    ),
    (
        "gradient_checkpointing_kwargs",
        lambda c: set(c.optim.checkpointing_args) - {"use_reentrant"},
        "only 'use_reentrant' is known",
    ),
    ("torch_compile", lambda c: c.optim.torch_compile, "layers are not compiled yet; drop the key"),
    (
        "activation_offloading",
        lambda c: c.optim.activation_offloading,
        "activations stay on the device; 'gradient_checkpointing: true' saves most of their memory",
    ),
    (
        "neftune_noise_alpha",
        lambda c: c.optim.neftune_alpha,
        "noise on embeddings is not supported; drop the key",
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


def refuse_unsupported(config: Config) -> None:
    """Raise for everything in a config that would otherwise have no effect or fail late."""
    if config.method.online:
        raise UserError(f"rl: {config.method.name} trains on its own samples, which `train` cannot produce yet.")
    refused = [f"{key}: {text}." for key, asked, text in UNSUPPORTED if asked(config)]
    if refused:
        raise UserError("\n".join(refused))
    if getattr(config.method, "precompute_ref_log_probs", False):
        refuse_inexact(config.method)
