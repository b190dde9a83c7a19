"""What to use for arguments that a config does not take: those of other versions of TRL, and of other objects."""

from fnmatch import fnmatchcase

from upweight.errors import did_you_mean

NEAR = 0.72  # below it, names of other things are taken for misspelt ones
BOUNDED_TOGETHER = "Remove it and set 'max_length', the tokens of prompt and completion together."
LORA = "An adapter is an input of the trainer: 'peft_config=LoraConfig(r=16, ...)'."
QUANTISED = "Quantisation is an input of the trainer: 'quantization_config=BitsAndBytesConfig(load_in_4bit=True)'."
LOADING = "It is an option of loading: write it in 'model_init_kwargs'."
ALIGNED = "A teacher with another tokenizer is compared by 'teacher_align=\"text\"' of the configs of distillation."
TEACHER_URL = "Give the server's URL as 'teacher_model_name_or_path' (DistillationConfig, GKDConfig)."
WITHOUT_VALUES = "There is no value model here: GRPO and RLOO compare the completions of a prompt."
OF_ONLINE = "It is an argument of GRPOConfig and RLOOConfig."
ON_WHICH_GPU = (
    "Set CUDA_VISIBLE_DEVICES where the vLLM server is started; with vllm_mode='colocate' it is the GPU that trains."
)

# A name that ends in `*` is a prefix.
REPLACED = {
    "max_seq_length": "It is 'max_length' now.",
    "max_prompt_length": BOUNDED_TOGETHER,
    "max_target_length": BOUNDED_TOGETHER,
    "dataset_batch_size": "Rows are prepared in batches anyway; leave it out.",
    "evaluation_strategy": "It is 'eval_strategy' now.",
    "no_cuda": "It is 'use_cpu' now.",
    "rpo_alpha": "It is loss_type=['sigmoid', 'sft'] with loss_weights=[1.0, rpo_alpha] now.",
    "reference_free": "CPO and SimPO (CPOConfig) need no reference.",
    "force_use_ref_model": "Pass the trainer a 'ref_model' beside 'peft_config'; leave it out.",
    "ref_model_init_kwargs": "A 'ref_model' given by name is loaded with 'model_init_kwargs'.",
    "generate_during_eval": "Remove it; `upweight inference` answers with the trained model.",
    "tokenizer": "Pass it to the trainer, as 'processing_class'.",
    "dataset_text_field": "Rename the columns of the dataset to prompt and those that the method reads.",
    "model_adapter_name": "The active adapter is trained.",
    "ref_adapter_name": "The reference is the adapter as it is at the start.",
    "max_completion_length": BOUNDED_TOGETHER,
    "overwrite_output_dir": "Leave it out: a run that is not resumed starts from the beginning in its 'output_dir'.",
    "logging_dir": "Leave it out; the environment variable TENSORBOARD_LOGGING_DIR names TensorBoard's folder.",
    "label_pad_token_id": "Leave it out: labels are not padded.",
    "padding_value": "Leave it out: rows are packed, not padded.",
    "use_logits_to_keep": "Leave it out: logits are computed where they are needed only.",
    "use_num_logits_to_keep": "Leave it out: logits are computed where they are needed only.",
    "is_encoder_decoder": "Leave it out: models that decode from an encoder are not trained.",
    "wandb_project": "Set the environment variable WANDB_PROJECT.",
    "wandb_entity": "Set the environment variable WANDB_ENTITY.",
    "wandb_run_group": "Set the environment variable WANDB_RUN_GROUP.",
    "lr": "It is 'learning_rate'.",
    "epochs": "It is 'num_train_epochs'.",
    "batch_size": "It is 'per_device_train_batch_size'.",
    "per_device_batch_size": "It is 'per_device_train_batch_size'.",
    "group_by_length": "Leave it out: rows are packed, so their lengths need not be alike.",
    "model_name_or_path": "Pass it to the trainer, as 'model'.",
    "model_revision": "It is 'revision' in 'model_init_kwargs'.",
    "attn_implementation": LOADING,
    "dtype": LOADING,
    "torch_dtype": "It is 'dtype' in 'model_init_kwargs'.",
    "peft_config": LORA,
    "use_peft": LORA,
    "use_rslora": LORA,
    "use_dora": LORA,
    "lora_*": LORA,
    "load_in_*": QUANTISED,
    "bnb_4bit_*": QUANTISED,
    "use_bnb_nested_quant": QUANTISED,
    "reward_funcs": "Pass it to the trainer, as 'reward_funcs'.",
    "reward_model_path": "Pass the trainer the reward model's name in 'reward_funcs'.",
    "tools": "Pass it to the trainer, as 'tools'.",
    "epsilon_low": "It is 'epsilon', and 'epsilon_high' is the bound above.",
    "missing_eos_penalty": "Write it as a reward function, or set 'mask_truncated_completions'.",
    "response_length": "It is 'max_completion_length', of GRPOConfig and RLOOConfig.",
    "max_new_tokens": "It is 'max_completion_length', of GRPOConfig and RLOOConfig.",
    "num_generations": OF_ONLINE,
    "rloo_k": "It is 'num_generations', of GRPOConfig and RLOOConfig.",
    "temperature": OF_ONLINE,
    "use_vllm": OF_ONLINE,
    "stop_token": "Write what ends a completion in 'generation_kwargs', as 'stop'.",
    "kl_coef": "It is 'beta', of GRPOConfig and RLOOConfig.",
    "cliprange": "It is 'epsilon', of GRPOConfig.",
    "cliprange_value": WITHOUT_VALUES,
    "vf_coef": WITHOUT_VALUES,
    "lam": WITHOUT_VALUES,
    "whiten_rewards": "It is 'scale_rewards', of GRPOConfig, and 'normalize_advantages', of RLOOConfig.",
    "num_ppo_epochs": "It is 'num_iterations', of GRPOConfig and RLOOConfig.",
    "num_sample_generations": "Set 'log_completions=True', of GRPOConfig and RLOOConfig.",
    "log_completions_steps": "Completions are shown with each log: 'log_completions' and 'logging_steps'.",
    "wandb_log_unique_prompts": "It is 'log_unique_prompts' now.",
    "vllm_device": ON_WHICH_GPU,
    "vllm_dtype": "Leave it out: with 'colocate' vLLM has the dtype of training, and a server its own --dtype.",
    "vllm_max_model_len": "It is 'vllm_max_model_length' now.",
    "vllm_enable_prefix_caching": "Leave it out: it is vLLM's default.",
    "vllm_guided_decoding_regex": "It is 'vllm_structured_outputs_regex' now.",
    "vllm_server_url": "It is 'vllm_server_base_url', of GRPOConfig and RLOOConfig.",
    "use_vllm_server": "It is 'use_vllm=True' with 'vllm_mode=\"server\"', of GRPOConfig and RLOOConfig.",
    "vllm_sync_frequency": "Leave it out: weights are sent to vLLM before each rollout.",
    "use_teacher_server": TEACHER_URL,
    "teacher_model_server_url": TEACHER_URL,
    "teacher_server_url*": TEACHER_URL,
    "teacher_temperature": "It is 'temperature', of both models.",
    "teacher_tokenizer_name_or_path": "Leave it out: the tokenizer is the teacher's own.",
    "teacher_top_k": "It is 'loss_top_k'.",
    "distillation_topk": "It is 'loss_top_k'.",
    "loss_add_tail": "It is 'loss_tail' now, and True is 'bucket'.",
    "add_tail_bucket": "It is 'loss_tail' now, and True is 'bucket'.",
    "use_uld_loss": ALIGNED,
    "uld_*": ALIGNED,
    "lmbda": "It is an argument of GKDConfig: the share of the student's own samples (1 in DistillationConfig).",
    "seq_kd": "It is an argument of GKDConfig: the teacher writes the samples.",
}


BOUNDED_APART = "Prompts are bounded by 'max_prompt_length', completions by 'max_completion_length'."
ONLINE = {"max_seq_length": BOUNDED_APART, "max_target_length": BOUNDED_APART}  # of methods that sample


def advice(name: str, known: list[str], *, online: bool = False) -> str:
    """Return what to use in place of an argument that is not taken, among those that are `known`."""
    if online and name in ONLINE:
        return ONLINE[name]
    pattern = next((pattern for pattern in REPLACED if fnmatchcase(name, pattern)), None)
    if pattern is not None:
        return REPLACED[pattern]
    return did_you_mean(name, known, NEAR).strip() or "`upweight docs api` has all that are taken."
