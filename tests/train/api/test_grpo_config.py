import dataclasses
import logging

import pytest
from peft import LoraConfig

from upweight import GRPOConfig
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.log import _warned
from upweight.methods import GRPO
from upweight.train.api.as_config import build_config
from upweight.train.objects import Objects
from upweight.train.online.assemble import build_plan

# Every argument of TRL 1.16's GRPOConfig beyond those of transformers, and three that scripts for older ones pass.
NAMES = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
num_generations_eval max_completion_length shuffle_dataset pad_to_multiple_of ds3_gather_for_generation
generation_batch_size steps_per_generation temperature top_p top_k min_p repetition_penalty generation_kwargs
chat_template_kwargs cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config
use_transformers_paged use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap beta num_iterations
epsilon epsilon_high delta importance_sampling_level loss_type scale_rewards reward_weights multi_objective_aggregation
mask_truncated_completions use_bias_correction_kl off_policy_mask_threshold top_entropy_quantile sapo_temperature_pos
sapo_temperature_neg vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta
entropy_target max_tool_calling_iterations log_completions num_completions_to_print log_unique_prompts log_multimodal
log_completions_hub_repo use_liger_kernel max_prompt_length warmup_ratio use_liger_loss
"""

SCRIPTS = {"vllm_mode": "colocate", "sleep_mode": False}  # which are not the defaults of a config


def config(tmp_path, **given):
    return GRPOConfig(output_dir=str(tmp_path), **given)


def test_every_argument_of_scripts_is_there():
    assert set(NAMES.split()) <= {field.name for field in dataclasses.fields(GRPOConfig)}


def test_defaults_are_those_of_the_method_and_the_rollouts(tmp_path):
    args = config(tmp_path, max_steps=None)
    assert args.method() == GRPO()
    assert args.section(RolloutSection) == RolloutSection(**SCRIPTS)
    assert (args.max_steps, args.max_completion_length, args.max_prompt_length) == (-1, 256, None)
    with_adapter = Objects(arguments=args, peft_config=LoraConfig())
    assert [build_config(args, given).optim.learning_rate for given in (Objects(), with_adapter)] == [1e-6, 1e-5]


def test_settings_reach_the_method_and_the_rollouts_under_their_own_names(tmp_path):
    args = config(
        tmp_path,
        num_generations=4,
        scale_rewards=True,
        reward_weights=[1.0, 0.5],
        multi_objective_aggregation="normalize_then_sum",
        vllm_importance_sampling_cap=2.0,
        generation_kwargs={"stop": ["\n"]},
        num_iterations=2,
        min_p=0.1,
        num_completions_to_print=3,
    )
    policy = {"num_generations": 4, "reward_weights": (1.0, 0.5), "sampler_correction_cap": 2.0}
    assert args.method() == GRPO(**policy, scale_rewards=True, aggregation="normalize_then_sum")
    assert args.section(RolloutSection) == RolloutSection(
        **SCRIPTS, generation_args={"stop": ["\n"]}, num_iterations=2, min_p=0.1, completions_shown=3
    )


@pytest.mark.parametrize(
    ("given", "groups", "step", "updates"),
    [
        ({"per_device_train_batch_size": 8}, 1, 8, 1),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}, 4, 32, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 3}, 1, 8, 3),
        # a longer rollout feeds several steps
        ({"per_device_train_batch_size": 8, "steps_per_generation": 4}, 4, 8, 4),
        ({"per_device_train_batch_size": 8, "generation_batch_size": 32, "num_iterations": 2}, 4, 8, 8),
        # a shorter one than the step: the weights are the same for all of the step, so it is generated at once
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, 4, 32, 1),
        # groups that span steps
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, 1, 4, 2),
        ({"per_device_train_batch_size": 6}, 3, 6, 4),
        ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "generation_batch_size": 24}, 6, 16, 3),
    ],
)
def test_batches_count_completions(given, groups, step, updates, tmp_path):
    plan = build_plan(build_config(config(tmp_path, num_generations=8, **given)), 1)
    assert (plan.groups, plan.step_size, plan.steps_per_rollout) == (groups, step, updates)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, "'gradient_accumulation_steps=8'"),
        ({"per_device_train_batch_size": 6}, "'gradient_accumulation_steps=4'"),
        ({"per_device_train_batch_size": 16, "generation_batch_size": 24}, "generation_batch_size: 24"),
    ],
)
def test_a_batch_that_does_not_fit_names_the_smallest_change(given, words, tmp_path, caplog):
    _warned.clear()
    with caplog.at_level(logging.WARNING, "upweight"):
        config(tmp_path, num_generations=8, **given)
    (record,) = caplog.records
    assert words in record.getMessage()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({"log_completions_hub_repo": "a/b"}, "log_completions_hub_repo"),
        ({"max_length": 100}, "max_length: prompts are bounded"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "steps_per_generation: cannot be used with"),
        ({"num_generations": 1}, "GRPOConfig: num_generations: "),
        ({"loss_type": "ppo"}, "GRPOConfig: loss_type: "),
        ({"sync_ref_model": True}, "sync_ref_model needs a reference: set beta above 0"),
        ({"temperature": 0.0}, "GRPOConfig: temperature: "),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio"),
        ({"warmup_ratio": 3}, "warmup_ratio: a share below 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(asked, words, tmp_path):
    with pytest.raises(UserError, match=words):
        config(tmp_path, **asked)


def test_what_is_for_a_server_alone_may_be_said(tmp_path, caplog):
    _warned.clear()
    with caplog.at_level(logging.WARNING, "upweight"):
        config(
            tmp_path, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.5, vllm_max_model_length=512
        )
        config(tmp_path, cache_implementation="static", ds3_gather_for_generation=True)
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == ["cache_implementation"]


def test_the_share_of_warmup_and_the_best_model(tmp_path):
    args = config(tmp_path, warmup_ratio=0.1, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps")
    assert args.get_warmup_steps(200) == 20
    assert (args.metric_for_best_model, args.greater_is_better) == ("reward", True)
