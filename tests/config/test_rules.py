"""Rules across keys: each has a config that breaks it and one that does not."""

from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.config.resolve import generation_batch
from upweight.config.rules import ERRORS, EXCLUSIVE, WARNINGS, WHOLE_CONFIG, WHOLE_CONFIG_WARNINGS
from upweight.errors import UserError

WHOLE = {"base_model": "m", "datasets": [{"path": "d"}]}
LORA = {"adapter": "lora", "lora_target_linear": True}
GRPO = {**WHOLE, "rl": "grpo", "trl": {"reward_funcs": ["r.f"]}}

BROKEN = {
    "colocated_vllm_sleeps_while_training": {
        **GRPO,
        "trl": {**GRPO["trl"], "use_vllm": True, "vllm_mode": "colocate", "async_prefetch": True},
    },
    "model_is_named": {"datasets": [{"path": "d"}]},
    "data_is_named": {"base_model": "m"},
    "rewards_are_named": {**WHOLE, "rl": "gdpo"},
    "ebft_has_its_block": {**WHOLE, "rl": "ebft"},
    "best_model_needs_evaluation": {**WHOLE, "load_best_model_at_end": True},
    "held_out_rows_are_whole": {**WHOLE, "val_set_size": 1.5},
    "gym_is_complete": {**GRPO, "nemo_gym_enabled": True},
    "half_precisions_exclude_each_other": {**WHOLE, "bf16": True, "fp16": True},
    "quantised_weights_need_an_adapter": {**WHOLE, "load_in_8bit": True},
    "qlora_needs_4_bits": {**WHOLE, **LORA, "adapter": "qlora"},
    "adapter_folder_needs_an_adapter": {**WHOLE, "lora_model_dir": "x"},
    "batch_size_divides": {**WHOLE, "batch_size": 5, "micro_batch_size": 2},
    "weights_match_rewards": {**GRPO, "trl": {"reward_funcs": ["r.f"], "reward_weights": [1.0, 2.0]}},
    "labels_match_the_head": {**WHOLE, "reward_model": True, "num_labels": 2},
    "template_text_is_given": {**WHOLE, "chat_template": "jinja"},
    "reasoning_names_its_parser": {**WHOLE, "vllm": {"enable_reasoning": True}},
    "shard_exists": {**WHOLE, "datasets": [{"path": "d", "shards": 2, "shards_idx": 2}]},
    "datasets_have_a_source": {**WHOLE, "datasets": [{"type": "alpaca"}]},
    "formats_are_known": {**WHOLE, "rl": "dpo", "datasets": [{"path": "d", "type": "chat_templat"}]},
    "templates_are_known": {**WHOLE, "chat_template": "chatlm"},
    "features_are_what_rewards": {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}, "trl": {"use_vllm": True}},
    "environment_is_complete": {**GRPO, "environment": {"type": "python"}},
    "one_thing_answers_to_turns": {**GRPO, "tools": ["t.f"], "environment": {"type": "openenv", "url": "u"}},
    "environment_reward_has_a_source": {**GRPO, "trl": {"reward_funcs": ["reward_env"]}},
}
ODD = {
    "evaluation_has_data": {**WHOLE, "eval_steps": 5},
    "groups_fit_the_batch": {**GRPO, "micro_batch_size": 4},
    "sequences_are_not_cut_online": {**GRPO, "sequence_len": 64},
    "adapter_keys_need_an_adapter": {**WHOLE, "lora_r": 4},
    "rollout_keys_need_rollouts": {**WHOLE, "rl": "dpo", "trl": {"temperature": 0.5}},
    "run_ahead_needs_a_server": {**GRPO, "trl": {"reward_funcs": ["r.f"], "async_prefetch": True}},
    "adapter_sync_needs_an_adapter": {**GRPO, "trl": {"reward_funcs": ["r.f"], "vllm_lora_sync": True}},
    "truncated_sampling_is_not_comparable": {**GRPO, "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "top_p": 0.9}},
    "pure_bf16_loses_updates": {**WHOLE, "bfloat16": True},
    "keys_of_the_other_mode": {**WHOLE, "rl": "ebft", "ebft": {"stride": 4}},
    "whitened_samples_are_orthogonal": {**WHOLE, "rl": "ebft", "ebft": {"use_whitening": True, "diversity_coef": 1.0}},
}


def notices(content):
    return parse_config(content, folder=Path()).notices


@pytest.mark.parametrize("rule", [*ERRORS, *WHOLE_CONFIG], ids=lambda rule: rule.__name__)
def test_each_error_rule_speaks_when_broken(rule):
    if rule.__name__ not in BROKEN:
        pytest.fail(f"give {rule.__name__} a config that breaks it")
    with pytest.raises(UserError) as caught:
        parse_config(BROKEN[rule.__name__], folder=Path())
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("rule", [*WARNINGS, *WHOLE_CONFIG_WARNINGS], ids=lambda rule: rule.__name__)
def test_each_warning_rule_speaks_when_it_should(rule):
    assert len(notices(ODD[rule.__name__])) == 1


@pytest.mark.parametrize(
    "content", [WHOLE, {**WHOLE, **LORA}, GRPO, {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}}]
)
def test_plain_configs_have_nothing_to_say(content):
    assert notices(content) == ()


@pytest.mark.parametrize("keys", EXCLUSIVE, ids=" ".join)
def test_exclusive_keys(keys):
    values = {"rl": "dpo", "fsdp": ["full_shard"], "deepspeed": "x.json", "test_datasets": [{"path": "d"}]}
    flags = {"reward_model", "process_reward_model", "load_in_4bit", "load_in_8bit", "fp16", "bfloat16"}
    content: dict = dict(WHOLE)
    for key in keys[:2]:
        block, dot, name = key.partition(".")
        value = values.get(key, True if key in flags else 0.5 if "ratio" in key or key == "val_set_size" else 2)
        if dot:
            content.setdefault(block, {})[name] = value
        else:
            content[key] = value
    with pytest.raises(UserError, match=f"cannot be used with '{keys[0]}'"):
        parse_config(content, folder=Path())


def test_a_server_without_rollouts_is_remarked_on():
    (notice,) = notices({**WHOLE, "rl": "dpo", "vllm": {"port": 8001}})
    assert notice == "vllm.port: no effect with rl: dpo: nothing is sampled"


def test_groups_that_do_not_fit_are_mended_with_a_word():
    config = parse_config({**GRPO, "micro_batch_size": 4}, folder=Path())
    assert generation_batch(config) == 8
    assert "'gradient_accumulation_steps: 2' would fit" in config.notices[0]
    assert generation_batch(config, ranks=2) == 8
    assert generation_batch(config, ranks=3) == 24


@pytest.mark.parametrize(
    ("sizes", "made", "says"),
    [
        ({"generation_batch_size": 10}, 40, "trl.generation_batch_size: 40"),
        ({"steps_per_generation": 3}, 24, "trl.steps_per_generation: 6"),
        ({"generation_batch_size": 16}, 16, None),
        ({"steps_per_generation": 1}, 8, None),  # within an accumulation, for all of it
    ],
)
def test_a_rollout_that_does_not_fit_names_the_key_that_would(sizes, made, says):
    content = {**GRPO, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
    config = parse_config({**content, "trl": {**GRPO["trl"], "num_generations": 4, **sizes}}, folder=Path())
    assert generation_batch(config) == made
    notices = [notice for notice in config.notices if "whole groups" in notice]
    assert notices == [] if says is None else says in notices[0]


def test_an_online_batch_is_one_group_when_nothing_is_said():
    config = parse_config({**GRPO, "trl": {"reward_funcs": ["r.f"], "num_generations": 4}}, folder=Path())
    assert (config.optim.micro_batch_size, config.optim.accumulation, generation_batch(config)) == (4, 1, 4)


def test_batch_size_stands_for_accumulation():
    config = parse_config({**WHOLE, "batch_size": 8, "micro_batch_size": 2}, folder=Path())
    assert (config.optim.micro_batch_size, config.optim.accumulation) == (2, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "nemo_gym_datasets: missing"),
        ({"nemo_gym_datasets": [{"path": "x"}]}, "nemo_gym_config_paths: needed"),
        (
            {"nemo_gym_datasets": [{"path": "x"}], "nemo_gym_auto_start": False, "nemo_gym_multi_turn": True},
            "nemo_gym_multi_turn: needs 'trl.use_vllm: true'",
        ),
    ],
)
def test_a_gym_needs_rows_servers_and_for_agents_a_server_of_turns(keys, message):
    with pytest.raises(UserError, match=message):
        parse_config({**GRPO, "nemo_gym_enabled": True, **keys}, folder=Path())
