"""Keys about rollouts: sampling, rewards, the vLLM server, NeMo Gym."""

from typing import Any, Literal

from pydantic import Field

from upweight.settings import PositiveInt, Section, Strict, inner, setting

IN_PROCESS = "in_process"


class RolloutSection(Section):
    """Sampling of completions and their rewards."""

    use_vllm: bool = setting("trl.use_vllm", False, "Sample from vLLM instead of in process.")
    vllm_mode: Literal["server", "colocate"] = setting(
        "trl.vllm_mode", "server", "A separate server, or vLLM inside the training process."
    )
    server_url: str | None = setting("trl.vllm_server_base_url", None, "Server address, instead of host and port.")
    server_urls: list[str] = setting("trl.vllm_server_base_urls", [], "Addresses of servers that divide the prompts.")
    server_host: str | None = setting("trl.vllm_server_host", None, "Host of the server. When left out: `vllm.host`.")
    server_port: int | None = setting(
        "trl.vllm_server_port", None, "Port of the server. When left out: `vllm.port`.", ge=1, le=65535
    )
    server_timeout: float = setting("trl.vllm_server_timeout", 240, "Seconds to wait for the server.", gt=0)
    regex: str | None = setting("trl.vllm_structured_outputs_regex", None, "Pattern every completion must match.")
    sleep_mode: bool = setting("trl.vllm_enable_sleep_mode", True, "Colocated vLLM frees its memory while training.")
    colocate_memory: float = setting(
        "trl.vllm_gpu_memory_utilization", 0.3, "Share of the GPU's memory for colocated vLLM.", gt=0, le=1
    )
    colocate_length: PositiveInt | None = setting(
        "trl.vllm_max_model_length", None, "Longest sequence of colocated vLLM."
    )
    colocate_parallel: PositiveInt = setting("trl.vllm_tensor_parallel_size", 1, "GPUs that share colocated vLLM.")
    sync_interval: PositiveInt = setting("trl.vllm_sync_interval", 1, "Optimizer steps between weight syncs.")
    lora_sync: bool | None = setting(
        "trl.vllm_lora_sync",
        None,
        "Send only the adapter, not merged weights. When left out: if vLLM can load the adapter.",
    )
    weight_transfer: Literal["folder", "nccl", "ipc"] = setting(
        "trl.vllm_weight_transfer",
        "folder",
        "How weights are sent to a server: by files in a folder, NCCL between GPUs, or IPC on one GPU.",
    )
    reward_funcs: list[str] = setting("trl.reward_funcs", [], "Rewards: dotted paths, built-in names or reward models.")
    reward_workers: PositiveInt = setting("trl.reward_num_workers", 1, "Processes that compute rewards.")
    reward_timeout: float = setting("trl.reward_timeout", 120, "Longest time of one reward call, in seconds.", gt=0)
    rollout_func: str | None = setting("trl.rollout_func", None, "Function, by dotted path, that makes completions.")
    rollout_backend: str | None = setting(
        "trl.rollout_backend", None, "Class, by dotted path, that samples completions in place of vLLM or this process."
    )
    rollout_backend_args: dict[str, Any] = setting("trl.rollout_backend_kwargs", {}, "Arguments of `rollout_backend`.")
    generation_batch_size: PositiveInt | None = setting(
        "trl.generation_batch_size", None, "Completions per rollout. When left out: those of one optimizer step."
    )
    steps_per_generation: PositiveInt | None = setting(
        "trl.steps_per_generation", None, "Accumulation steps per rollout; an alternative to `generation_batch_size`."
    )
    num_iterations: PositiveInt = setting("trl.num_iterations", 1, "Passes over each rollout.")
    num_generations_eval: PositiveInt | None = setting(
        "trl.num_generations_eval", None, "Completions per prompt in evaluation. When left out: as in training."
    )
    temperature: float = setting("trl.temperature", 1.0, "Sampling temperature.", gt=0)
    top_p: float = setting(
        "trl.top_p", 1.0, "Sample only from the most likely tokens whose probabilities sum up to this.", gt=0, le=1
    )
    top_k: int = setting("trl.top_k", 0, "Number of most likely tokens that are kept; 0 keeps all.", ge=0)
    min_p: float | None = setting(
        "trl.min_p", None, "Never sample tokens whose probability is below this share of the highest one.", ge=0, le=1
    )
    repetition_penalty: float = setting(
        "trl.repetition_penalty", 1.0, "Penalty on tokens that the sequence already has; 1 is none.", gt=0
    )
    generation_args: dict[str, Any] = setting("trl.generation_kwargs", {}, "Further sampling options, such as `stop`.")
    compile_sampler: bool = setting(
        "trl.compile_sampler", True, "Compile the sampler on a GPU: the first call is slower, all others are faster."
    )
    release_sampler: bool = setting(
        "trl.release_sampler", False, "Free the memory of sampling in this process after each rollout."
    )
    sampler_quantization: Literal["int8"] | None = setting(
        "trl.sampler_quantization", None, "Sample with weights in 8 bits, and train with the importance correction."
    )
    routing_replay: bool | Literal["measure"] = setting(
        "trl.routing_replay", False, "Train with the experts that the sampler chose; `measure` only compares them."
    )
    log_completions: bool = setting("trl.log_completions", False, "Show sampled completions in the terminal.")
    completions_shown: PositiveInt | None = setting(
        "trl.num_completions_to_print", None, "Number of completions that `trl.log_completions` shows."
    )
    async_prefetch: bool = setting(
        "trl.async_prefetch", False, "Sample the next rollouts while training on the last one."
    )
    prefetch_depth: PositiveInt = setting("trl.prefetch_depth", 1, "Rollouts that may be produced ahead.")
    max_staleness: int | None = setting(
        "trl.max_staleness",
        None,
        "Most optimizer steps between sampling and training. When left out: what `prefetch_depth` allows.",
        ge=0,
    )
    streaming: bool = setting("trl.streaming_partial_batch", False, "Score groups and train on them as they finish.")
    streaming_groups: PositiveInt = setting(
        "trl.streaming_min_groups", 1, "Groups that are scored at a time, for `trl.streaming_partial_batch`."
    )
    replay_size: int = setting(
        "trl.replay_buffer_size",
        0,
        "Groups kept to replace groups whose completions all got the same reward; 0: off.",
        ge=0,
    )
    replay_recompute: bool = setting("trl.replay_recompute_logps", True, "Recompute the log-probs of replayed groups.")
    replay_max_age: PositiveInt = setting(
        "trl.replay_max_age", 64, "Optimizer steps that a group stays in the replay buffer."
    )
    reroll_start: float = setting(
        "trl.reroll_start_fraction", 1.0, "Share of training before failed prompts are retried; 1 is off.", ge=0, le=1
    )
    reroll_groups: PositiveInt = setting("trl.reroll_max_groups", 1, "Failed prompts tried again per rollout.")
    skip_zero_advantage: bool = setting(
        "trl.skip_zero_advantage_batches",
        True,
        "Leave completions out of training whose advantage is 0, if they do not change the loss.",
    )
    dynamic_sampling: int = setting(
        "trl.dynamic_sampling_max_rounds",
        0,
        "Rounds of sampling again to replace groups whose completions all got the same reward; 0: off.",
        ge=0,
    )

    @property
    def backend(self) -> str:
        """Return the name of the backend that samples completions, or the dotted path of a user's."""
        return f"vllm_{self.vllm_mode}" if self.use_vllm else self.rollout_backend or IN_PROCESS


class VllmSection(Section):
    """Options with which `upweight vllm-serve` starts the server."""

    host: str = setting("vllm.host", "127.0.0.1", "Address the server listens on.")
    port: int = setting("vllm.port", 8000, "Port the server listens on.", ge=1, le=65535)
    device: str = setting("vllm.device", "auto", "Device kind the server runs on.")
    tensor_parallel_size: PositiveInt = setting("vllm.tensor_parallel_size", 1, "GPUs that share the model.")
    data_parallel_size: PositiveInt = setting("vllm.data_parallel_size", 1, "Copies of the model.")
    memory: float = setting("vllm.gpu_memory_utilization", 0.9, "Share of the GPU's memory to use.", gt=0, le=1)
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = setting(
        "vllm.dtype", "auto", "Precision of the served weights."
    )
    max_model_len: PositiveInt | None = setting("vllm.max_model_len", None, "Longest sequence that the server accepts.")
    prefix_caching: bool | None = setting("vllm.enable_prefix_caching", None, "Reuse the cache of common prefixes.")
    enforce_eager: bool = setting("vllm.enforce_eager", False, "Run without CUDA graphs.")
    scale_out: bool = setting(
        "vllm.enable_scale_out", False, "Open the routes for token ids, which images need and vLLM 0.32 keeps closed."
    )
    reasoning: bool = setting("vllm.enable_reasoning", False, "Separate reasoning text; needs `reasoning_parser`.")
    reasoning_parser: str | None = setting("vllm.reasoning_parser", None, "vLLM's parser for reasoning text.")
    tool_call_parser: str | None = setting(
        "vllm.tool_call_parser", None, "vLLM's parser for tool calls; with `nemo_gym_multi_turn`, hermes when left out."
    )
    max_lora_rank: PositiveInt | None = setting(
        "vllm.max_lora_rank", None, "Largest adapter rank. When left out: `lora_r`."
    )


class GymDataset(Strict):
    """One entry of `nemo_gym_datasets`."""

    path: str = Field(description="File of rows, absolute or relative to `nemo_gym_dir`.")
    server_name: str | None = inner(None, "Server that verifies these rows.")
    max_samples: PositiveInt | None = inner(None, "Number of rows to take at random.")


class GymSection(Section):
    """NeMo Gym environments."""

    enabled: bool = setting("nemo_gym_enabled", False, "Use NeMo Gym for rollouts or rewards.")
    folder: str = setting("nemo_gym_dir", "~/Gym", "Folder of the Gym repository.")
    auto_start: bool = setting("nemo_gym_auto_start", True, "Start the Gym's servers.")
    config_paths: list[str] = setting(
        "nemo_gym_config_paths", [], "Gym configs to start. When left out: those of the datasets."
    )
    head_port: int = setting("nemo_gym_head_port", 11000, "Port of the Gym's head server.", ge=1, le=65535)
    server_timeout: float = setting("nemo_gym_server_timeout", 360, "Seconds to wait for servers to start.", gt=0)
    verify_timeout: float = setting("nemo_gym_verify_timeout", 30, "Seconds one request may take.", gt=0)
    run_timeout: float = setting(
        "nemo_gym_run_timeout",
        300,
        "Seconds that a rollout of the Gym's agents may take; if only `nemo_gym_verify_timeout` is set, that.",
        gt=0,
    )
    datasets: list[GymDataset] = setting("nemo_gym_datasets", [], "Rows and the servers that verify them.")
    model_name: str | None = setting(
        "nemo_gym_model_name", None, "Model name in the Gym's requests. When left out: `base_model`."
    )
    multi_turn: bool = setting("nemo_gym_multi_turn", False, "Let the Gym's agents run the episodes.")
    reward_components: list[str] = setting(
        "nemo_gym_reward_components",
        [],
        "Components of the verification that become separate rewards. When left out: only the total.",
    )
    policy_port: int = setting("nemo_gym_policy_port", 11001, "Port where agents reach the policy.", ge=1, le=65535)
    isolate: bool | None = setting(
        "nemo_gym_isolate",
        None,
        "Start servers without network and write access. When left out: where the system allows it.",
    )
    max_turns: PositiveInt | None = setting("nemo_gym_max_turns", None, "Most turns of a multi-turn rollout.")
