"""Keys of other trainers: the ones we satisfy by construction, those we rename, and those we refuse by name."""

PACKED = "rows are always packed without padding, and that does not change any number"
FUSED_HEAD = "logits are never built: the head is computed in chunks for every method"
KERNELS = "the engine picks its own kernels"
OWN_SERVER = "vLLM's own server is started; no module of ours runs inside it"
FSDP2 = "FSDP2 needs no such choice"
BUILT_IN = "built in"

# A key here may be set; it holds already, and `load` says so once.
SATISFIED: dict[str, str] = {
    "sample_packing": PACKED,
    "eval_sample_packing": PACKED,
    "sample_packing_group_size": PACKED,
    "sample_packing_bin_size": PACKED,
    "sample_packing_sequentially": PACKED,
    "sample_packing_mp_start_method": PACKED,
    "multipack_real_batches": PACKED,
    "pad_to_sequence_len": PACKED,
    "pad_to_multiple_of": PACKED,
    "batch_flattening": PACKED,
    "dpo_padding_free": PACKED,
    "group_by_length": "batches are balanced by tokens",
    "trl.use_liger_loss": FUSED_HEAD,
    "dpo_use_liger_kernel": FUSED_HEAD,
    "liger_fused_linear_cross_entropy": FUSED_HEAD,
    "liger_cross_entropy": FUSED_HEAD,
    "chunked_cross_entropy": FUSED_HEAD,
    "chunked_cross_entropy_num_chunks": FUSED_HEAD,
    "cut_cross_entropy": FUSED_HEAD,
    "flash_attn_cross_entropy": FUSED_HEAD,
    "liger_rope": KERNELS,
    "liger_rms_norm": KERNELS,
    "liger_layer_norm": KERNELS,
    "liger_glu_activation": KERNELS,
    "liger_swiglu": KERNELS,
    "lora_mlp_kernel": KERNELS,
    "lora_qkv_kernel": KERNELS,
    "lora_o_kernel": KERNELS,
    "lora_embedding_kernel": KERNELS,
    "flash_attn_fuse_mlp": KERNELS,
    "flash_attn_fuse_qkv": KERNELS,
    "heads_k_stride": "context parallelism exchanges heads, not ring blocks",
    "ring_attn_func": "context parallelism exchanges heads, not ring blocks",
    "trl.use_data_producer": "every online run goes through the one producer",
    "remove_unused_columns": "each method keeps the columns it needs",
    "strict": "unknown keys are always errors",
    "save_safetensors": "weights are always written as safetensors",
    "low_cpu_mem_usage": "weights are always loaded without a second copy",
    "is_llama_derived_model": "architectures are told by the model itself",
    "is_mistral_derived_model": "architectures are told by the model itself",
    "is_qwen_derived_model": "architectures are told by the model itself",
    "is_falcon_derived_model": "architectures are told by the model itself",
    "include_tokens_per_second": "tokens per second are always logged",
    "include_tkps": "tokens per second are always logged",
    "ddp": "the launcher decides",
    "local_rank": "the launcher decides",
    "world_size": "the launcher decides",
    "ddp_find_unused_parameters": "the engine uses every trained parameter in each forward",
    "hf_use_auth_token": "the hub's own login is used",
    "debug": "`upweight preprocess --show` prints prepared rows",
    "merge_method": "adapters are merged shard by shard",
    "vllm.serve_module": OWN_SERVER,
    "vllm.worker_extension_cls": OWN_SERVER,
    "nemo_gym_auto_clone": "the Gym is taken from `nemo_gym_dir`",
    "fsdp_config.sync_module_states": FSDP2,
    "fsdp_config.use_orig_params": FSDP2,
    "fsdp_config.limit_all_gathers": FSDP2,
    "fsdp_config.backward_prefetch": FSDP2,
    "fsdp_config.forward_prefetch": FSDP2,
    "fsdp_config.mixed_precision_policy": "precision follows `bf16` and `fp16`",
    "fsdp_config.cpu_offload_pin_memory": FSDP2,
}

# Deprecated spelling -> the key that replaced it.
RENAMED: dict[str, str] = {
    "dpo_beta": "rl_beta",
    "evaluation_strategy": "eval_strategy",
    "sequence_parallel_degree": "context_parallel_size",
    "dataset_processes": "dataset_num_proc",
    "max_prompt_len": "max_prompt_length",
    "fsdp_final_state_dict_type": "fsdp_config.final_state_dict_type",
    "fsdp_config.cpu_offload": "fsdp_config.offload_params",
    "trl.vllm_guided_decoding_regex": "trl.vllm_structured_outputs_regex",
    "vllm.max_model_length": "vllm.max_model_len",
}

# Older switches for what is now `attn_implementation`.
ATTENTION_SWITCHES: dict[str, str] = {
    "flash_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}

# Plugins whose work is built in.
PLUGINS: dict[str, str] = {
    "axolotl.integrations.nemo_gym.NemoGymPlugin": "NeMo Gym is built in",
    "axolotl.integrations.liger.LigerPlugin": FUSED_HEAD,
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": FUSED_HEAD,
}

_NOT_HERE: dict[str, str] = {
    "vision models are not supported": "image_size image_resize_algorithm processor_type processor_kwargs"
    " role_boundaries freeze_mm_modules",
    "Ray is not supported; use --num-processes": "use_ray ray_run_name ray_num_workers resources_per_worker",
    "a chat window is not built in; use `upweight inference --chat`": "gradio_title gradio_share gradio_server_name"
    " gradio_server_port gradio_max_new_tokens gradio_temperature",
    "not supported; use full fine-tuning or LoRA": "lisa_n_layers lisa_step_interval lisa_layers_attribute relora"
    " relora_steps relora_warmup_steps relora_anneal_steps relora_prune_ratio relora_prune_method relora_cpu_offload"
    " jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps",
    "not supported; trackers are wandb, mlflow, tensorboard and trackio": "use_comet comet_api_key comet_workspace"
    " comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config use_otel_metrics"
    " otel_metrics_host otel_metrics_port",
    "this optimizer is not supported": "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank"
    " qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits"
    " qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size optim_target_modules"
    " adam_beta3 adam_epsilon2 torchdistx_path",
    "not supported; use `lr_scheduler` with `lr_scheduler_kwargs`": "lr_quadratic_warmup cosine_constant_lr_ratio"
    " lr_div_factor",
    "not supported; save a quantised model with another tool": "qat quantization gptq use_onebitllms"
    " model_quantization_config model_quantization_config_kwargs quantize_moe_experts",
    "not supported; use bf16": "fp8 fp8_enable_fsdp_float8_all_gather float16 float32 fp32_norms fp32_norm_classes",
    "this attention is not supported; leave it out and the tree attention serves": "xformers_attention sage_attention"
    " s2_attention flash_optimum flex_attn_compile_kwargs gemma4_hybrid_attn_impl large_head_attention flash_attn_d512"
    " sdpa_varlen fused_attn_kernel scaling_softmax scaling_softmax_factor scaling_softmax_bias flash_attn_rms_norm"
    " experts_implementation use_kernels",
    "pretraining on raw streams is not supported": "pretraining_dataset pretraining_sample_concatenation streaming"
    " streaming_multipack_buffer_size pretrain_multipack_buffer_size pretrain_multipack_attn use_pose"
    " pose_split_on_token_ids pose_max_context_len pose_num_chunks",
    "not supported; spread a model by FSDP, DeepSpeed or `context_parallel_size`": "tensor_parallel_size dp_shard_size"
    " dp_replicate_size device_map max_memory gpu_memory_limit device",
    "removed; use `dpo_loss_type: [sigmoid, sft]`": "rpo_alpha",
    "removed; set `rope_parameters` in `model_config`": "rope_scaling",
    "removed; use `sequence_len`": "max_packed_sequence_len",
    "removed; it is always so": "dpo_use_logits_to_keep dpo_norm_loss dpo_generate_during_eval",
    "not supported; use `neftune_noise_alpha`": "noisy_embedding_alpha",
    "not supported; use `evaluate` or an evaluation harness": "do_bench_eval bench_dataset bench_split"
    " do_causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens generate_samples"
    " num_generation_samples generation_max_new_tokens generation_temperature generation_top_p generation_top_k"
    " generation_prompt_ratio generation_do_sample",
    "not supported; the token budget is lowered by itself when memory runs out": "auto_find_batch_size",
    "not supported; use `gradient_checkpointing` or `activation_offloading`": "selective_checkpointing layer_offloading"
    " tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp unsloth_cross_entropy_loss unsloth_lora_mlp"
    " unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope",
    "not supported; use `torch_compile: true`": "torch_compile_backend torch_compile_mode torch_compile_options"
    " deepcompile",
    "not supported; use `torch_empty_cache_steps`": "gc_steps gc_collect_steps",
    "not supported; save with `save_steps` or by SIGTERM": "dynamic_checkpoint",
    "not supported; methods are chosen by `rl`": "trainer_cls",
    "not supported": "accelerator_config added_tokens_overrides cls_model_config dataset_shard_by eaft_alpha eaft_k"
    " embeddings_skip_upcast experimental_skip_move_to_device fix_untrained_tokens is_preprocess"
    " llama4_linearized_experts lora_on_cpu merge_lora num_dataset_shards_to_save peft_autocast_adapter_dtype"
    " peft_ensure_weight_tying peft_layer_replication peft_trainable_token_indices preprocess_iterable"
    " push_dataset_to_hub qlora_sharded_model_loading reinit_weights sample_packing_eff_est shrink_embeddings"
    " tokenizer_save_jinja_files tokenizer_use_mistral_common total_num_tokens total_supervised_tokens use_eaft"
    " trl.use_transformers_paged trl.use_transformers_continuous_batching trl.cache_implementation"
    " trl.vllm_group_port trl.vllm_model_impl bf16_full",
}
# Known to another trainer and absent here: an error that says so, unless the value asks for nothing.
REFUSED: dict[str, str] = {key: reason for reason, keys in _NOT_HERE.items() for key in keys.split()}
