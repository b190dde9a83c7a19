"""The configs of GRPO and RLOO for Python scripts, under TRL's names."""

from dataclasses import dataclass
from typing import Any, ClassVar

from upweight.config.peers import FUSED_HEAD, STANDARD_SERVER
from upweight.config.sections.data import DataSection
from upweight.config.sections.model import TeacherSection
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.methods import GRPO, RLOO
from upweight.rollout.sampling_params import build_sampling
from upweight.train.api.configs import MethodArguments
from upweight.train.api.fields import field_for, no_effect, refused, with_help

SAMPLER = "the sampler keeps each prompt once for all its completions, and drops rows as they end"
ADAPTIVE = "With `use_adaptive_entropy`, which is not supported."
FLOAT32_LOGITS = "logits are in float32 already, the head's weights as the model's; remove it"
IN_A_FOLDER = "completions are written to `output_dir/completions`; remove it"
BOUNDED_APART = "prompts are bounded by `max_prompt_length`, completions by `max_completion_length`; remove it"


@dataclass
class RolloutArguments(MethodArguments):
    """The arguments that online methods share: sampling and scoring of completions; a batch counts completions."""

    max_length: int | None = refused(None, BOUNDED_APART)
    max_completion_length: int = field_for(GRPO, "max_completion_length")
    reward_weights: list[float] | None = field_for(GRPO, "reward_weights")  # noqa: RUF009
    epsilon: float = field_for(GRPO, "epsilon")
    epsilon_high: float | None = field_for(GRPO, "epsilon_high")
    mask_truncated_completions: bool = field_for(GRPO, "mask_truncated_completions")
    sync_ref_model: bool = field_for(GRPO, "sync_ref_model")
    ref_model_mixup_alpha: float = field_for(GRPO, "ref_model_mixup_alpha")
    ref_model_sync_steps: int = field_for(GRPO, "ref_model_sync_steps")

    num_generations_eval: int | None = field_for(RolloutSection, "num_generations_eval")
    max_prompt_length: int | None = field_for(DataSection, "max_prompt_length")
    shuffle_dataset: bool = with_help(True, "Take prompts in a new order in each epoch.")
    ds3_gather_for_generation: bool = no_effect(True, "weights are whole where completions are sampled")

    generation_batch_size: int | None = field_for(RolloutSection, "generation_batch_size")
    steps_per_generation: int | None = field_for(RolloutSection, "steps_per_generation")
    num_iterations: int = field_for(RolloutSection, "num_iterations")
    temperature: float = field_for(RolloutSection, "temperature")
    top_p: float = field_for(RolloutSection, "top_p")
    top_k: int = field_for(RolloutSection, "top_k")
    min_p: float | None = field_for(RolloutSection, "min_p")
    repetition_penalty: float = field_for(RolloutSection, "repetition_penalty")
    generation_kwargs: dict[str, Any] | None = field_for(RolloutSection, "generation_args", default=None)  # noqa: RUF009
    chat_template_kwargs: dict[str, Any] | None = field_for(DataSection, "template_args", default=None)  # noqa: RUF009
    cache_implementation: str | None = no_effect(None, SAMPLER)
    use_transformers_paged: bool = no_effect(False, SAMPLER)
    use_transformers_continuous_batching: bool = no_effect(False, SAMPLER)
    transformers_continuous_batching_config: dict[str, Any] | None = no_effect(None, SAMPLER)  # noqa: RUF009

    use_vllm: bool = field_for(RolloutSection, "use_vllm")
    vllm_mode: str = field_for(RolloutSection, "vllm_mode", default="colocate")
    vllm_server_base_url: str | None = field_for(RolloutSection, "server_url")
    vllm_server_host: str | None = field_for(RolloutSection, "server_host")
    vllm_server_port: int | None = field_for(RolloutSection, "server_port")
    vllm_server_timeout: float = field_for(RolloutSection, "server_timeout")
    vllm_group_port: int = no_effect(51216, STANDARD_SERVER)
    vllm_model_impl: str = no_effect("vllm", STANDARD_SERVER)
    vllm_structured_outputs_regex: str | None = field_for(RolloutSection, "regex")
    vllm_enable_sleep_mode: bool = field_for(RolloutSection, "sleep_mode", default=False)
    vllm_gpu_memory_utilization: float = field_for(RolloutSection, "colocate_memory")
    vllm_max_model_length: int | None = field_for(RolloutSection, "colocate_length")
    vllm_tensor_parallel_size: int = field_for(RolloutSection, "colocate_parallel")

    rollout_backend: str | None = field_for(RolloutSection, "rollout_backend")
    rollout_backend_kwargs: dict[str, Any] | None = field_for(RolloutSection, "rollout_backend_args", default=None)  # noqa: RUF009
    compile_sampler: bool = field_for(RolloutSection, "compile_sampler")
    release_sampler: bool = field_for(RolloutSection, "release_sampler")
    sampler_quantization: str | None = field_for(RolloutSection, "sampler_quantization")
    routing_replay: bool | str = field_for(RolloutSection, "routing_replay")
    reward_num_workers: int = field_for(RolloutSection, "reward_workers")
    reward_timeout: float = field_for(RolloutSection, "reward_timeout")
    dynamic_sampling_max_rounds: int = field_for(RolloutSection, "dynamic_sampling")
    skip_zero_advantage_batches: bool = field_for(RolloutSection, "skip_zero_advantage")
    streaming_partial_batch: bool = field_for(RolloutSection, "streaming")
    streaming_min_groups: int = field_for(RolloutSection, "streaming_groups")

    max_tool_calling_iterations: int | None = with_help(None, "Turns that may call tools before the last one.")
    log_completions: bool = field_for(RolloutSection, "log_completions")
    num_completions_to_print: int | None = field_for(RolloutSection, "completions_shown")
    log_unique_prompts: bool = no_effect(False, "what is shown is spread over the prompts")
    log_multimodal: bool = no_effect(True, "there are no images")

    def __post_init__(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"  # online evaluations have no loss
        super().__post_init__()
        for name in ("vllm_server_base_url", "vllm_server_host", "vllm_server_port"):
            if self.use_vllm and self.vllm_mode == "colocate" and getattr(self, name):
                raise UserError(f"{name}: is for vllm_mode='server'; with 'colocate' the trainer starts vLLM itself.")
        build_sampling(self.section(RolloutSection), self.max_completion_length)

    def data_settings(self) -> dict[str, Any]:
        """Return the data settings; without `shuffle_dataset`, prompts are taken in order."""
        known = super().data_settings()
        return known | {"curriculum": known["curriculum"] or not self.shuffle_dataset}


@dataclass
class GRPOConfig(RolloutArguments):
    """Settings of GRPO and its loss variants."""

    method_class: ClassVar = GRPO

    num_generations: int = field_for(GRPO, "num_generations")
    vllm_importance_sampling_correction: bool | None = field_for(GRPO, "sampler_correction")
    vllm_importance_sampling_mode: str | None = field_for(GRPO, "sampler_correction_mode")
    vllm_importance_sampling_clip_max: float = field_for(GRPO, "sampler_correction_cap")
    vllm_importance_sampling_cap: float | None = field_for(GRPO, "sampler_correction_cap", default=None)
    vllm_importance_sampling_clip_min: float | None = field_for(GRPO, "sampler_correction_floor")
    beta: float = field_for(GRPO, "beta")
    loss_type: str = field_for(GRPO, "loss_type")  # or a function
    method_args: dict[str, Any] | None = field_for(GRPO, "method_args", default=None)  # noqa: RUF009
    delta: float | None = field_for(GRPO, "delta")
    importance_sampling_level: str = field_for(GRPO, "importance_sampling_level")
    advantage_estimator: str = field_for(GRPO, "advantage_estimator")  # or a function
    scale_rewards: str = field_for(GRPO, "scale_rewards")  # or a bool, which a command line could not tell from "group"
    multi_objective_aggregation: str = field_for(GRPO, "aggregation")
    teacher_kl_coef: float = field_for(GRPO, "teacher_kl_coef")
    teacher_model_name_or_path: str | None = field_for(TeacherSection, "teacher")
    teacher_align: str | None = field_for(TeacherSection, "align")
    reward_to_go: bool = field_for(GRPO, "reward_to_go")
    gamma: float = field_for(GRPO, "gamma")
    use_bias_correction_kl: bool = field_for(GRPO, "use_bias_correction_kl")
    off_policy_mask_threshold: float | None = field_for(GRPO, "off_policy_mask_threshold")
    top_entropy_quantile: float = field_for(GRPO, "top_entropy_quantile")
    sapo_temperature_pos: float = field_for(GRPO, "sapo_temperature_pos")
    sapo_temperature_neg: float = field_for(GRPO, "sapo_temperature_neg")
    vespo_k_pos: float = field_for(GRPO, "vespo_k_pos")
    vespo_lambda_pos: float = field_for(GRPO, "vespo_lambda_pos")
    vespo_k_neg: float = field_for(GRPO, "vespo_k_neg")
    vespo_lambda_neg: float = field_for(GRPO, "vespo_lambda_neg")
    entropy_coef: float = field_for(GRPO, "entropy_coef")
    use_adaptive_entropy: bool = refused(False, "not supported; `entropy_coef` is a fixed weight")
    entropy_coef_min: float = with_help(0.0, ADAPTIVE)
    entropy_coef_max: float = with_help(1.0, ADAPTIVE)
    entropy_coef_delta: float = with_help(0.005, ADAPTIVE)
    entropy_target: float = with_help(0.2, ADAPTIVE)
    cast_lm_head_to_fp32: bool = refused(False, FLOAT32_LOGITS)
    use_liger_loss: bool = no_effect(False, FUSED_HEAD)
    log_completions_hub_repo: str | None = refused(None, IN_A_FOLDER)


@dataclass
class RLOOConfig(RolloutArguments):
    """Settings of RLOO."""

    method_class: ClassVar = RLOO

    num_generations: int = field_for(RLOO, "num_generations")
    beta: float = field_for(RLOO, "beta")
    normalize_advantages: bool = field_for(RLOO, "normalize_advantages")
    reward_clip_range: tuple[float, float] | None = field_for(RLOO, "reward_clip_range")
