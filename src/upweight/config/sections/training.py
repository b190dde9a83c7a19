"""Keys about optimisation, sharding and distributed training."""

from typing import Any, Literal, get_args

from pydantic import Field

from upweight.settings import PositiveInt, Section, Strict, UserPath, setting

OptimizerName = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw", "paged_adamw_32bit",
    "paged_adamw_8bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "lion",
    "lion_8bit", "paged_lion", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit", "adafactor", "sgd", "adagrad", "adamw_torch_4bit", "adamw_torch_8bit", "schedule_free_adamw",
    "schedule_free_sgd", "schedule_free_radam", "stable_adamw", "galore_adamw", "galore_adamw_8bit",
    "galore_adafactor", "apollo_adamw", "muon",
]  # fmt: skip
FROM_BITSANDBYTES = {name for name in get_args(OptimizerName) if name.startswith(("paged_", "lion", "ademamix"))}
FROM_BITSANDBYTES |= {name for name in get_args(OptimizerName) if "bnb" in name or name == "adamw_8bit"}
GALORE = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor")
LOW_RANK = (*GALORE, "apollo_adamw")  # of gradients, projected to few dimensions
SchedulerName = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr",
    "polynomial", "inverse_sqrt", "reduce_lr_on_plateau", "warmup_stable_decay",
]  # fmt: skip

FsdpWord = Literal[
    "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "auto_wrap", "offload",
]  # fmt: skip
StateDict = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
LESS_MEMORY = (  # remedies, the cheapest first
    "'memory: lean', or of its keys 'gradient_checkpointing: true' alone; a shorter 'sequence_len' or "
    "'trl.max_completion_length'; 'adapter: lora'; 'adapter: qlora' with 'load_in_4bit: true'; 'fsdp: true' over more "
    "GPUs; `upweight fits CONFIG` estimates each"
)


class RateGroup(Strict):
    """A learning rate for named modules."""

    name: str = Field(description="Name of the group in the logs.")
    modules: list[str] = Field(description="Parameters whose names contain one of these.")
    lr: float = Field(description="Their learning rate.", gt=0)


class OptimSection(Section):
    """Batch sizes, optimizer, schedule, memory saving."""

    learning_rate: float | None = setting(
        "learning_rate", None, "Peak learning rate. When left out: the default of the method.", gt=0
    )
    micro_batch_size: PositiveInt | None = setting(
        "micro_batch_size",
        None,
        "Examples per device and accumulation step. Memory depends on `token_budget`, not on this. Where no key is "
        "about batches: 1, for KTO 8, for online methods one group.",
    )
    accumulation: PositiveInt | None = setting(
        "gradient_accumulation_steps",
        None,
        "Accumulation steps; times `micro_batch_size` it is the batch of one device in an optimizer step.",
    )
    batch_size: PositiveInt | None = setting(
        "batch_size", None, "Examples per step and device; instead of `gradient_accumulation_steps`."
    )
    token_budget: PositiveInt | None = setting(
        "token_budget",
        None,
        "Most tokens in one forward. It does not change results. When left out, device memory decides.",
    )
    eval_batch_size: PositiveInt | None = setting("eval_batch_size", None, "Examples per evaluation step and device.")
    num_epochs: float = setting("num_epochs", 1.0, "Passes over the data.", gt=0)
    max_steps: PositiveInt | None = setting("max_steps", None, "Number of optimizer steps; overrides `num_epochs`.")
    optimizer: OptimizerName | UserPath = setting(
        "optimizer", "adamw_torch_fused", "Optimizer, named as in transformers; or a class or function of yours."
    )
    optimizer_args: str | dict[str, Any] | None = setting("optim_args", None, "Further arguments of the optimizer.")
    optim_target_modules: list[str] | str | None = setting(
        "optim_target_modules", None, "Linear layers whose gradients GaLore or APOLLO project; `all-linear` for all."
    )
    muon_momentum: float = setting("muon_momentum", 0.95, "Muon's momentum.", ge=0, lt=1)
    muon_nesterov: bool = setting("muon_nesterov", True, "Whether Muon's momentum is Nesterov's.")
    muon_ns_steps: PositiveInt = setting("muon_ns_steps", 5, "Newton-Schulz steps of Muon.")
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = setting(
        "muon_adjust_lr",
        "match_rms_adamw",
        "How Muon scales its rate by a weight's shape; the default fits AdamW's rates.",
    )
    scheduler: SchedulerName | UserPath = setting(
        "lr_scheduler", "cosine", "Learning rate schedule, named as in transformers; or a function of yours."
    )
    scheduler_args: dict[str, Any] = setting("lr_scheduler_kwargs", {}, "Further arguments of the schedule.")
    cosine_min_ratio: float | None = setting(
        "cosine_min_lr_ratio", None, "Cosine schedule: final rate as a share of the peak.", ge=0, le=1
    )
    warmup_steps: float | None = setting(
        "warmup_steps", None, "Steps of linear warm-up; a value below 1 is a share of all steps.", ge=0
    )
    warmup_ratio: float | None = setting("warmup_ratio", None, "Warm-up as a share of all steps.", ge=0, le=1)
    weight_decay: float = setting("weight_decay", 0.0, "Decoupled weight decay.", ge=0)
    adam_beta1: float = setting("adam_beta1", 0.9, "Adam's beta1.", ge=0, lt=1)
    adam_beta2: float = setting("adam_beta2", 0.999, "Adam's beta2.", ge=0, lt=1)
    adam_epsilon: float = setting("adam_epsilon", 1e-8, "Adam's epsilon.", gt=0)
    max_grad_norm: float = setting("max_grad_norm", 1.0, "Gradients are clipped to this norm; 0 turns it off.", ge=0)
    embedding_lr: float | None = setting("embedding_lr", None, "Learning rate of the embeddings.", gt=0)
    embedding_lr_scale: float | None = setting(
        "embedding_lr_scale", None, "Learning rate of the embeddings as a multiple of `learning_rate`.", gt=0
    )
    lr_groups: list[RateGroup] = setting("lr_groups", [], "Learning rates for named modules.")
    unfrozen: list[str] | None = setting("unfrozen_parameters", None, "Patterns of parameters; only these are trained.")
    router_aux_loss_coef: float | None = setting(
        "router_aux_loss_coef",
        None,
        "Weight of the load-balancing loss of a mixture of experts; 0: off. When left out: the model's.",
        ge=0,
    )
    neftune_alpha: float | None = setting("neftune_noise_alpha", None, "NEFTune noise on embeddings, for SFT.", gt=0)
    seed: int = setting("seed", 42, "Seed of every random choice.", ge=0, lt=2**32)
    full_determinism: bool = setting("full_determinism", False, "Use deterministic kernels only; slower.")
    memory: Literal["lean", "balanced", "fast"] = setting(
        "memory",
        "balanced",
        "lean: the least memory; fast: the most speed that memory allows. It sets keys that are left out.",
    )
    gradient_checkpointing: bool = setting("gradient_checkpointing", False, "Recompute activations to save memory.")
    checkpointing_args: dict[str, Any] = setting(
        "gradient_checkpointing_kwargs",
        {},
        "Options of checkpointing: `use_reentrant`, `every_layer`, `keep`.",
    )
    activation_offloading: bool = setting(
        "activation_offloading", False, "Keep the activations of gradient checkpointing in host memory."
    )
    tiled_mlp: bool = setting(
        "tiled_mlp",
        False,
        "Compute the gated blocks of rows longer than `token_budget` in tiles of 2,048 tokens, for less memory.",
    )
    reference_offloading: bool = setting(
        "reference_offloading", False, "Keep the reference's weights in host memory while they are not used."
    )
    head_chunk: PositiveInt | None = setting(
        "head_chunk_tokens",
        None,
        "Most tokens whose logits exist at a time. When left out, the kind of device decides.",
    )
    torch_compile: bool = setting(
        "torch_compile", False, "Refused: attention and head are compiled anyway, layers never."
    )
    empty_cache_steps: PositiveInt | None = setting(
        "torch_empty_cache_steps", None, "Steps between two clearings of the GPU's memory cache."
    )


class ShardingSection(Section):
    """Sharding over devices, and context parallelism."""

    deepspeed: str | dict[str, Any] | None = setting("deepspeed", None, "DeepSpeed config: a path or the options.")
    fsdp: list[FsdpWord] | bool | None = setting(
        "fsdp", None, "Shard weights, gradients and optimizer states over the ranks; on when `fsdp_config` is set."
    )
    fsdp_version: Literal[1, 2] = setting(
        "fsdp_version", 2, "FSDP version; 1 is accepted and means 2.", also=("fsdp_config.version",)
    )
    wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] = setting(
        "fsdp_config.auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "What becomes a sharding unit."
    )
    wrap_layers: str | list[str] | None = setting(
        "fsdp_config.transformer_layer_cls_to_wrap", None, "Layer classes to shard. When left out, they are detected."
    )
    min_parameters: PositiveInt | None = setting(
        "fsdp_config.min_num_params", None, "Fewest parameters of a unit, for SIZE_BASED_WRAP."
    )
    reshard: bool = setting("fsdp_config.reshard_after_forward", True, "Free gathered weights after the forward.")
    offload: bool = setting("fsdp_config.offload_params", False, "Keep shards in host memory.")
    state_dict: StateDict = setting("fsdp_config.state_dict_type", "SHARDED_STATE_DICT", "How checkpoints are written.")
    final_state_dict: StateDict = setting(
        "fsdp_config.final_state_dict_type", "FULL_STATE_DICT", "How the final model is written."
    )
    low_memory_loading: bool = setting(
        "fsdp_config.cpu_ram_efficient_loading", True, "Load weights on one rank and broadcast them to the others."
    )
    fsdp_checkpointing: bool = setting(
        "fsdp_config.activation_checkpointing", False, "Another name of `gradient_checkpointing`."
    )
    context_parallel_size: PositiveInt = setting(
        "context_parallel_size",
        1,
        "Number of ranks that share the tokens of a row; it must divide the number of attention heads.",
    )
    timeout: PositiveInt = setting(
        "ddp_timeout", 1800, "Seconds after which a collective operation between ranks fails and the run stops."
    )
    wait_timeout: PositiveInt = setting(
        "ddp_wait_timeout", 86400, "Seconds that ranks wait for data, rollouts or weights of other ranks."
    )
    bucket_mb: PositiveInt | None = setting("ddp_bucket_cap_mb", None, "Size of DDP's gradient buckets in MiB.")
    broadcast_buffers: bool = setting("ddp_broadcast_buffers", False, "Whether DDP sends buffers at every step.")
