"""The configs of GRPO and RLOO for Python scripts, under TRL's names."""

from dataclasses import dataclass
from typing import Any, ClassVar

from upweight.config.peers import FUSED_HEAD, STANDARD_SERVER
from upweight.config.sections.data import DataSection
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.methods import GRPO, RLOO
from upweight.rollout.sampling_params import build_sampling
from upweight.train.api.configs import MethodArguments
from upweight.train.api.fields import holds, of, refused, with_help

SAMPLER = "the sampler keeps each prompt once for all its completions, and drops rows as they end"
ADAPTIVE = "With `use_adaptive_entropy`, which is not supported."
FLOAT32_LOGITS = "logits are in float32 already, the head's weights as the model's; remove it"
IN_A_FOLDER = "completions are written to `output_dir/completions`; remove it"
BOUNDED_APART = "prompts are bounded by `max_prompt_length`, completions by `max_completion_length`; remove it"


@dataclass
class RolloutArguments(MethodArguments):
    """The arguments that online methods share: sampling and scoring of completions; a batch counts completions."""

    max_length: int | None = refused(None, BOUNDED_APART)
    max_completion_length: int = of(GRPO, "max_completion_length")
    reward_weights: list[float] | None = of(GRPO, "reward_weights")  # noqa: RUF009
    epsilon: float = of(GRPO, "epsilon")
    epsilon_high: float | None = of(GRPO, "epsilon_high")
    mask_truncated_completions: bool = of(GRPO, "mask_truncated_completions")
    sync_ref_model: bool = of(GRPO, "sync_ref_model")
    ref_model_mixup_alpha: float = of(GRPO, "ref_model_mixup_alpha")
    ref_model_sync_steps: int = of(GRPO, "ref_model_sync_steps")

    num_generations_eval: int | None = of(RolloutSection, "num_generations_eval")
    max_prompt_length: int | None = of(DataSection, "max_prompt_length")
    shuffle_dataset: bool = with_help(True, "Take prompts in a new order in each epoch.")
    ds3_gather_for_generation: bool = holds(True, "weights are whole where completions are sampled")

    generation_batch_size: int | None = of(RolloutSection, "generation_batch_size")
    steps_per_generation: int | None = of(RolloutSection, "steps_per_generation")
    num_iterations: int = of(RolloutSection, "num_iterations")
    temperature: float = of(RolloutSection, "temperature")
    top_p: float = of(RolloutSection, "top_p")
    top_k: int = of(RolloutSection, "top_k")
    min_p: float | None = of(RolloutSection, "min_p")
    repetition_penalty: float = of(RolloutSection, "repetition_penalty")
    generation_kwargs: dict[str, Any] | None = of(RolloutSection, "generation_args", default=None)  # noqa: RUF009
    chat_template_kwargs: dict[str, Any] | None = of(DataSection, "template_args", default=None)  # noqa: RUF009
    cache_implementation: str | None = holds(None, SAMPLER)
    use_transformers_paged: bool = holds(False, SAMPLER)
    use_transformers_continuous_batching: bool = holds(False, SAMPLER)
    transformers_continuous_batching_config: dict[str, Any] | None = holds(None, SAMPLER)  # noqa: RUF009

    use_vllm: bool = of(RolloutSection, "use_vllm")
    vllm_mode: str = of(RolloutSection, "vllm_mode", default="colocate")
    vllm_server_base_url: str | None = of(RolloutSection, "server_url")
    vllm_server_host: str | None = of(RolloutSection, "server_host")
    vllm_server_port: int | None = of(RolloutSection, "server_port")
    vllm_server_timeout: float = of(RolloutSection, "server_timeout")
    vllm_group_port: int = holds(51216, STANDARD_SERVER)
    vllm_model_impl: str = holds("vllm", STANDARD_SERVER)
    vllm_structured_outputs_regex: str | None = of(RolloutSection, "regex")
    vllm_enable_sleep_mode: bool = of(RolloutSection, "sleep_mode", default=False)
    vllm_gpu_memory_utilization: float = of(RolloutSection, "colocate_memory")
    vllm_max_model_length: int | None = of(RolloutSection, "colocate_length")
    vllm_tensor_parallel_size: int = of(RolloutSection, "colocate_parallel")

    rollout_backend: str | None = of(RolloutSection, "rollout_backend")
    rollout_backend_kwargs: dict[str, Any] | None = of(RolloutSection, "rollout_backend_args", default=None)  # noqa: RUF009
    compile_sampler: bool = of(RolloutSection, "compile_sampler")
    reward_num_workers: int = of(RolloutSection, "reward_workers")
    reward_timeout: float = of(RolloutSection, "reward_timeout")
    dynamic_sampling_max_rounds: int = of(RolloutSection, "dynamic_sampling")
    skip_zero_advantage_batches: bool = of(RolloutSection, "skip_zero_advantage")
    streaming_partial_batch: bool = of(RolloutSection, "streaming")
    streaming_min_groups: int = of(RolloutSection, "streaming_groups")

    max_tool_calling_iterations: int | None = with_help(None, "Turns that may call tools before the last one.")
    log_completions: bool = of(RolloutSection, "log_completions")
    num_completions_to_print: int | None = of(RolloutSection, "completions_shown")
    log_unique_prompts: bool = holds(False, "what is shown is spread over the prompts")
    log_multimodal: bool = holds(True, "there are no images")

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

    num_generations: int = of(GRPO, "num_generations")
    vllm_importance_sampling_correction: bool | None = of(GRPO, "sampler_correction")
    vllm_importance_sampling_mode: str | None = of(GRPO, "sampler_correction_mode")
    vllm_importance_sampling_clip_max: float = of(GRPO, "sampler_correction_cap")
    vllm_importance_sampling_cap: float | None = of(GRPO, "sampler_correction_cap", default=None)
    vllm_importance_sampling_clip_min: float | None = of(GRPO, "sampler_correction_floor")
    beta: float = of(GRPO, "beta")
    loss_type: str = of(GRPO, "loss_type")
    delta: float | None = of(GRPO, "delta")
    importance_sampling_level: str = of(GRPO, "importance_sampling_level")
    advantage_estimator: str = of(GRPO, "advantage_estimator")
    scale_rewards: str = of(GRPO, "scale_rewards")  # or a bool, which a command line could not tell from "group"
    multi_objective_aggregation: str = of(GRPO, "aggregation")
    use_bias_correction_kl: bool = of(GRPO, "use_bias_correction_kl")
    off_policy_mask_threshold: float | None = of(GRPO, "off_policy_mask_threshold")
    top_entropy_quantile: float = of(GRPO, "top_entropy_quantile")
    sapo_temperature_pos: float = of(GRPO, "sapo_temperature_pos")
    sapo_temperature_neg: float = of(GRPO, "sapo_temperature_neg")
    vespo_k_pos: float = of(GRPO, "vespo_k_pos")
    vespo_lambda_pos: float = of(GRPO, "vespo_lambda_pos")
    vespo_k_neg: float = of(GRPO, "vespo_k_neg")
    vespo_lambda_neg: float = of(GRPO, "vespo_lambda_neg")
    entropy_coef: float = of(GRPO, "entropy_coef")
    use_adaptive_entropy: bool = refused(False, "not supported; `entropy_coef` is a fixed weight")
    entropy_coef_min: float = with_help(0.0, ADAPTIVE)
    entropy_coef_max: float = with_help(1.0, ADAPTIVE)
    entropy_coef_delta: float = with_help(0.005, ADAPTIVE)
    entropy_target: float = with_help(0.2, ADAPTIVE)
    cast_lm_head_to_fp32: bool = refused(False, FLOAT32_LOGITS)
    use_liger_loss: bool = holds(False, FUSED_HEAD)
    log_completions_hub_repo: str | None = refused(None, IN_A_FOLDER)


@dataclass
class RLOOConfig(RolloutArguments):
    """Settings of RLOO."""

    method_class: ClassVar = RLOO

    num_generations: int = of(RLOO, "num_generations")
    beta: float = of(RLOO, "beta")
    normalize_advantages: bool = of(RLOO, "normalize_advantages")
    reward_clip_range: tuple[float, float] | None = of(RLOO, "reward_clip_range")
