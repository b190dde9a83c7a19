"""Keys of other trainers: keys that need no action, keys with another name here, and keys that are refused."""

from fnmatch import fnmatchcase

PACKED = "rows are always packed without padding, and that does not change any number"
FUSED_HEAD = "logits are never built: the head is computed in chunks for every method"
KERNELS = "the engine picks its kernels"
OWN_SERVER = "the standard vLLM server is started, without modules of ours"

# Keys that are accepted without any effect, by the reason why none is needed; `load` adds one notice per reason.
HOLDS: dict[str, str] = {
    PACKED: "sample_packing eval_sample_packing sample_packing_group_size sample_packing_bin_size"
    " sample_packing_sequentially sample_packing_mp_start_method multipack_real_batches pad_to_sequence_len"
    " pad_to_multiple_of batch_flattening dpo_padding_free",
    "a step's tokens are a few kilobytes": "dataloader_pin_memory",
    "batches are balanced by tokens": "group_by_length",
    FUSED_HEAD: "trl.use_liger_loss dpo_use_liger_kernel liger_fused_linear_cross_entropy liger_cross_entropy"
    " chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy flash_attn_cross_entropy",
    KERNELS: "liger_rope liger_rms_norm liger_layer_norm liger_glu_activation liger_swiglu liger_rms_norm_gated"
    " liger_kernel_impl use_scattermoe use_sonicmoe use_kernels experts_implementation flash_attn_rms_norm"
    " flash_attn_fuse_norm flex_attn_compile_kwargs fused_attn_kernel gemma4_hybrid_attn_impl lora_mlp_kernel"
    " lora_qkv_kernel lora_o_kernel lora_embedding_kernel flash_attn_fuse_mlp flash_attn_fuse_qkv",
    "a model is placed on the rank's device, or sharded by `fsdp` or `deepspeed`": "device_map",
    "a model is placed on the rank's device": "experimental_skip_move_to_device",
    "context parallelism exchanges heads, not ring blocks": "heads_k_stride ring_attn_func",
    "every online run uses the rollout producer": "trl.use_data_producer",
    "each method keeps the columns it needs": "remove_unused_columns",
    "unknown keys are always errors": "strict",
    "weights are always written as safetensors": "save_safetensors",
    "weights are always loaded without a second copy": "low_cpu_mem_usage",
    "the architecture follows from the model's config": "is_llama_derived_model is_mistral_derived_model"
    " is_qwen_derived_model is_falcon_derived_model",
    "tokens per second are always logged": "include_tokens_per_second include_tkps",
    "the launcher decides": "ddp local_rank world_size",
    "the engine uses every trained parameter in each forward": "ddp_find_unused_parameters",
    "the login of huggingface_hub is used": "hf_use_auth_token",
    "`upweight preprocess --show` prints prepared rows": "debug",
    "adapters are merged shard by shard": "merge_method",
    OWN_SERVER: "vllm.serve_module vllm.worker_extension_cls",
    "a loss of NaN or infinity always stops the run": "logging_nan_inf_filter",
    "`hub_model_id` decides": "push_to_hub",
    "evaluation writes no table of samples": "eval_max_new_tokens eval_table_max_new_tokens",
    "FSDP shards over all ranks": "dp_shard_size",
    "FSDP2 needs no such choice": "fsdp_config.sync_module_states fsdp_config.use_orig_params"
    " fsdp_config.limit_all_gathers fsdp_config.backward_prefetch fsdp_config.forward_prefetch"
    " fsdp_config.cpu_offload_pin_memory",
    "precision follows `bf16` and `fp16`": "fsdp_config.mixed_precision_policy",
}
SATISFIED: dict[str, str] = {key: reason for reason, keys in HOLDS.items() for key in keys.split()}

# Deprecated spelling -> the key that replaced it.
RENAMED: dict[str, str] = {
    "dpo_beta": "rl_beta",
    "evaluation_strategy": "eval_strategy",
    "sequence_parallel_degree": "context_parallel_size",
    "dataset_processes": "dataset_num_proc",
    "fsdp_final_state_dict_type": "fsdp_config.final_state_dict_type",
    "fsdp_config.cpu_offload": "fsdp_config.offload_params",
    "trl.vllm_guided_decoding_regex": "trl.vllm_structured_outputs_regex",
    "trl.vllm_max_model_len": "trl.vllm_max_model_length",
}

# Name of a key in other trainers -> its name here.
OTHER_NAMES: dict[str, str] = {
    "max_prompt_len": "max_prompt_length",
    "dpo_ld_alpha": "ld_alpha",
    "adam_eps": "adam_epsilon",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "max_length": "sequence_len",
    "model_name_or_path": "base_model",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "lr": "learning_rate",
    "val_datasets": "test_datasets",
    "gc_steps": "torch_empty_cache_steps",
    "vllm.max_model_length": "vllm.max_model_len",
}

# Deprecated switches -> the value of `attn_implementation`.
ATTENTION_SWITCHES: dict[str, str] = {
    "flash_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}

# Deprecated spelling in an entry of `datasets`.
ROW_RENAMED: dict[str, str] = {"conversation": "chat_template", "train_on_split": "split"}

# Values that mean "off" for keys whose numbers start at 1, or at 2 where they divide a model.
OFF: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("evals_per_epoch", "saves_per_epoch", "eval_steps", "save_steps", "save_total_limit"), (0,)),
    **dict.fromkeys(("early_stopping_patience", "torch_empty_cache_steps"), (0,)),
    **dict.fromkeys(("tensor_parallel_size", "dp_replicate_size", "expert_parallel_size"), (1,)),
    "max_steps": (-1, 0),
}

# Plugins whose feature is built in.
PLUGINS: dict[str, str] = {
    "axolotl.integrations.nemo_gym.NemoGymPlugin": "NeMo Gym is built in",
    "axolotl.integrations.liger.LigerPlugin": FUSED_HEAD,
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": FUSED_HEAD,
    "axolotl.integrations.kernels.KernelsPlugin": KERNELS,
}

# Keys of other trainers that are refused, by the reason; a name that ends in `*` is a prefix.
NOT_HERE: dict[str, str] = {
    "vision models are not supported": "image_size image_resize_algorithm processor_type processor_kwargs"
    " role_boundaries freeze_mm_modules is_multimodal",
    "Ray is not supported; start ranks with --num-processes": "use_ray ray_run_name ray_num_workers"
    " resources_per_worker",
    "Gradio is not supported; use `upweight inference --chat`": "gradio_*",
    "not supported; train all weights, or an adapter by `adapter: lora`": "lisa_* relora* jagged_restart_* mixlora_*"
    " spectrum_* peft_layer_replication llama_adapter",
    "this tracker is not supported; there are wandb, mlflow, tensorboard and trackio": "use_comet comet_*"
    " use_otel_metrics otel_* use_swanlab swanlab_*",
    "this optimizer is not supported; `optimizer` lists those that are": "dion_* qgalore_* optim_target_modules"
    " adam_beta3 adam_epsilon2 torchdistx_path muon_* grokfast_* sinkgd_* flash_optim_*",
    "not supported; use `lr_scheduler` with `lr_scheduler_kwargs`": "lr_quadratic_warmup cosine_constant_lr_ratio"
    " lr_div_factor eta_min",
    "training on weights quantised in this way is not supported; use `load_in_4bit` or `load_in_8bit`": "qat"
    " quantization gptq gptq_* use_onebitllms model_quantization_config model_quantization_config_kwargs"
    " quantize_moe_experts llmcompressor nvfp4_* nf4_backend dsv4_*",
    "not supported; use `bf16: true`": "fp8 fp8_* float32 fp32_norms fp32_norm_classes",
    "this attention is not supported; leave it out and the tree attention serves": "xformers_attention sage_attention"
    " s2_attention flash_optimum large_head_attention flash_attn_d512 sdpa_varlen scaling_softmax"
    " scaling_softmax_factor scaling_softmax_bias",
    "training on an endless stream of raw text is not supported; use `datasets` with `type: completion`": ""
    " pretraining_dataset pretraining_sample_concatenation streaming streaming_multipack_buffer_size"
    " pretrain_multipack_buffer_size pretrain_multipack_attn use_pose pose_* overlap_len",
    "not supported; use FSDP, DeepSpeed or `context_parallel_size`": "tensor_parallel_size dp_replicate_size max_memory"
    " gpu_memory_limit device expert_parallel_* context_parallel",
    "removed; use `dpo_loss_type: [sigmoid, sft]`": "rpo_alpha",
    "removed; set `rope_parameters` in `model_config`": "rope_scaling",
    "removed; use `sequence_len`": "max_packed_sequence_len",
    "removed; leave it out": "dpo_use_logits_to_keep dpo_norm_loss dpo_generate_during_eval",
    "not supported; use `neftune_noise_alpha`": "noisy_embedding_alpha",
    "not supported; use `upweight evaluate` or an evaluation harness": "do_bench_eval bench_dataset bench_split"
    " do_causal_lm_eval eval_causal_lm_metrics eval_table_size lm_eval_* generate_samples num_generation_samples"
    " generation_*",
    "not supported; the token budget is lowered by itself when memory runs out": "auto_find_batch_size",
    "not supported; use `gradient_checkpointing` or `activation_offloading`": "selective_checkpointing layer_offloading"
    " tiled_mlp tiled_mlp_* unsloth_* ple_cpu_offload",
    "not supported; use `torch_compile: true`": "torch_compile_* deepcompile",
    "not supported; use `torch_empty_cache_steps`": "gc_collect_steps",
    "not supported; save with `save_steps`, or stop with SIGTERM": "dynamic_checkpoint",
    "not supported; the method is chosen by `rl`": "trainer_cls",
    "distillation and diffusion are not supported": "kd_* gkd_* diffusion*",
    "not supported; `sft_loss_type: dft` is": "use_dft liger_use_token_scaling use_eaft eaft_*",
    "not supported; use the tokenizer that transformers loads: leave it out": "tokenizer_use_mistral_common",
    "clone NeMo Gym yourself, and name its folder in `nemo_gym_dir`": "nemo_gym_auto_clone",
    "not supported; leave it out": "accelerator_config added_tokens_overrides base_model_ignore_patterns"
    " cls_model_config embeddings_skip_upcast fix_untrained_tokens is_preprocess lora_bias llama4_linearized_experts"
    " lora_on_cpu merge_lora num_dataset_shards_to_save peft_autocast_adapter_dtype peft_ensure_weight_tying"
    " peft_trainable_token_indices preprocess_iterable push_dataset_to_hub qlora_sharded_model_loading reinit_weights"
    " sample_packing_eff_est sample_packing_seq_len_multiplier shrink_embeddings tokenizer_save_jinja_files"
    " total_num_tokens total_supervised_tokens hatchery export balance_labels log_sweep_* autotune_*"
    " trl.use_transformers_paged trl.use_transformers_continuous_batching trl.cache_implementation trl.vllm_group_port"
    " trl.vllm_model_impl trl.use_adaptive_entropy trl.entropy_coef_* trl.entropy_target",
}
REASONS: dict[str, str] = {key: reason for reason, keys in NOT_HERE.items() for key in keys.split()}


def why_refused(path: str) -> str | None:
    """Return why a key of another trainer is refused, or None."""
    return REASONS.get(path) or next((reason for key, reason in REASONS.items() if fnmatchcase(path, key)), None)
