"""Rules across keys: each has a config that breaks it and one that does not."""

import ast
import inspect
from pathlib import Path

import pytest

from upweight.config import parse_config
from upweight.config.resolve import generation_batch
from upweight.config.rules import ebft as ebft_rules
from upweight.config.rules import rules, switched_keys
from upweight.config.rules.rules import EXCLUSIVE
from upweight.errors import UserError

WHOLE = {"base_model": "m", "datasets": [{"path": "d"}]}
LORA = {"adapter": "lora", "lora_target_linear": True}
GRPO = {**WHOLE, "rl": "grpo", "trl": {"reward_funcs": ["r.f"]}}

GYM = {"nemo_gym_enabled": True, "nemo_gym_auto_start": False, "nemo_gym_datasets": [{"path": "x"}]}
ROLLED = {**GRPO, "trl": {**GRPO["trl"], "rollout_func": "r.g"}}

BROKEN = {
    "reward_model: cannot be used with 'rl'": {**WHOLE, "rl": "dpo", "reward_model": True},
    "base_model: missing": {"datasets": [{"path": "d"}]},
    "datasets: missing": {"base_model": "m"},
    "trl.reward_funcs: missing": {**WHOLE, "rl": "gdpo"},
    "ebft: missing": {**WHOLE, "rl": "ebft"},
    "load_best_model_at_end: needs something": {**WHOLE, "load_best_model_at_end": True},
    "val_set_size: a share below 1": {**WHOLE, "val_set_size": 1.5},
    "fp16: cannot be used with 'bf16: true'": {**WHOLE, "bf16": True, "fp16": True},
    "load_in_8bit: quantised weights": {**WHOLE, "load_in_8bit": True},
    "adapter: qlora needs": {**WHOLE, **LORA, "adapter": "qlora"},
    "lora_model_dir: needs": {**WHOLE, "lora_model_dir": "x"},
    "batch_size: 5 is not a multiple": {**WHOLE, "batch_size": 5, "micro_batch_size": 2},
    "trl.reward_weights: 2 weights for 1": {**GRPO, "trl": {"reward_funcs": ["r.f"], "reward_weights": [1.0, 2.0]}},
    "num_labels: an outcome": {**WHOLE, "reward_model": True, "num_labels": 2},
    "num_labels: a process": {**WHOLE, "process_reward_model": True, "num_labels": 1},
    "chat_template_jinja: missing": {**WHOLE, "chat_template": "jinja"},
    "datasets[0].chat_template_jinja: missing": {**WHOLE, "datasets": [{"path": "d", "chat_template": "jinja"}]},
    "test_datasets[0].chat_template_jinja: missing": {
        **WHOLE,
        "test_datasets": [{"path": "d", "chat_template": "tokenizer_default_fallback_jinja"}],
    },
    "vllm.reasoning_parser: missing": {**WHOLE, "vllm": {"enable_reasoning": True}},
    "dataset_shard_idx: must be below": {**WHOLE, "dataset_shard_num": 2, "dataset_shard_idx": 2},
    "datasets[0].shards_idx: must be": {**WHOLE, "datasets": [{"path": "d", "shards": 2, "shards_idx": 2}]},
    "datasets[0]: names no data": {**WHOLE, "datasets": [{"type": "alpaca"}]},
    "datasets[0].type: there is no format": {**WHOLE, "rl": "dpo", "datasets": [{"path": "d", "type": "chat_templat"}]},
    "chat_template: there is no template": {**WHOLE, "chat_template": "chatlm"},
    "datasets[0].chat_template: there": {**WHOLE, "datasets": [{"path": "d", "chat_template": "chatlm"}]},
    "trl.use_vllm: blocks are": {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}, "trl": {"use_vllm": True}},
    "trl.num_iterations: strided": {**WHOLE, "rl": "ebft", "ebft": {"mode": "strided"}, "trl": {"num_iterations": 2}},
    "environment.class: missing": {**GRPO, "environment": {"type": "python"}},
    "environment.url: missing": {**GRPO, "environment": {"type": "openenv"}},
    "environment.wait: needs 'environment.type: openenv'": {**GRPO, "environment": {"wait": 5}},
    "tools: an OpenEnv server": {**GRPO, "tools": ["t.f"], "environment": {"type": "openenv", "url": "u"}},
    "trl.rollout_func: cannot be used with 'tools'": {**ROLLED, "tools": ["t.f"]},
    "nemo_gym_enabled: cannot be used with 'tools'": {**GRPO, **GYM, "tools": ["t.f"]},
    "tools: needs rl: grpo": {**WHOLE, "rl": "ebft", "ebft": {"mode": "structured"}, "tools": ["t.f"]},
    "trl.reward_funcs: 'reward_env' is what": {**GRPO, "trl": {"reward_funcs": ["reward_env"]}},
    "nemo_gym_datasets: missing": {**GRPO, "nemo_gym_enabled": True},
    "nemo_gym_config_paths: needed": {**GRPO, **GYM, "nemo_gym_auto_start": True},
    "nemo_gym_multi_turn: needs 'trl.use_vllm: true'": {**GRPO, **GYM, "nemo_gym_multi_turn": True},
    "trl.rollout_func: cannot be used with 'nemo_gym_enabled'": {**ROLLED, **GYM},
    "trl.async_prefetch: colocated vLLM sleeps": {
        **GRPO,
        "trl": {**GRPO["trl"], "use_vllm": True, "vllm_mode": "colocate", "async_prefetch": True},
    },
}
ODD = {
    "eval_steps: nothing is evaluated": {**WHOLE, "eval_steps": 5},
    "trl.num_generations: a batch of 4": {**GRPO, "micro_batch_size": 4},
    "trl.generation_batch_size: 10 completions": {**GRPO, "trl": {**GRPO["trl"], "generation_batch_size": 10}},
    "sequence_len: no effect": {**GRPO, "sequence_len": 64},
    "lora_r: no effect without": {**WHOLE, "lora_r": 4},
    "trl.temperature: no effect with rl: dpo": {**WHOLE, "rl": "dpo", "trl": {"temperature": 0.5}},
    "vllm.port: no effect with rl: dpo: nothing is sampled": {**WHOLE, "rl": "dpo", "vllm": {"port": 8001}},
    "trl.async_prefetch: without": {**GRPO, "trl": {"reward_funcs": ["r.f"], "async_prefetch": True}},
    "trl.vllm_lora_sync: there is no": {
        **GRPO,
        "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "vllm_lora_sync": True},
    },
    "trl.top_p, trl.top_k": {**GRPO, "trl": {"reward_funcs": ["r.f"], "use_vllm": True, "top_p": 0.9}},
    "bfloat16: weights are trained": {**WHOLE, "bfloat16": True},
    "trl.vllm_sync_interval: no effect on training": {**GRPO, "trl": {**GRPO["trl"], "vllm_sync_interval": 2}},
    "ebft.stride: no effect": {**WHOLE, "rl": "ebft", "ebft": {"stride": 4}},
    "ebft.diversity_coef: whit": {**WHOLE, "rl": "ebft", "ebft": {"use_whitening": True, "diversity_coef": 1.0}},
}


def notices(content):
    return parse_config(content, folder=Path()).notices


def error(content):
    with pytest.raises(UserError) as caught:
        parse_config(content, folder=Path())
    return str(caught.value)


@pytest.mark.parametrize("message", BROKEN)
def test_each_error_rule_speaks_when_broken(message):
    (said,) = error(BROKEN[message]).splitlines()
    assert said.startswith(message)


@pytest.mark.parametrize("message", ODD)
def test_each_warning_rule_speaks_when_it_should(message):
    (said,) = notices(ODD[message])
    assert said.startswith(message)


def test_every_rule_has_a_config_that_breaks_it():
    said = "\n".join([*map(error, BROKEN.values()), *(one for content in ODD.values() for one in notices(content))])
    for module in (rules, ebft_rules, switched_keys):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Yield) and not isinstance(node.value, ast.Tuple):
                words = max((str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)), key=len)
                assert words in said, "give this rule a config that breaks it"


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
