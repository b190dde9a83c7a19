"""What scripts for TRL pass: each argument is here, and so is its default, or this file says which is not."""

import dataclasses
import json
from pathlib import Path

import pytest

import upweight
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.train.api.inputs import NOT_TAKEN, parts_for

RECORD = json.loads((Path(__file__).parent / "trl_names.json").read_text())
DIFFERENCES = (Path(__file__).parents[3] / "docs" / "differences.md").read_text()

OTHER_DEFAULTS = {  # each is explained in docs/differences.md, or changes nothing
    "learning_rate",
    "gradient_checkpointing",
    "train_sampling_strategy",
    "disable_dropout",
    "max_completion_length",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
}
SAME_IN_EFFECT = {
    "pad_to_multiple_of",  # nothing is padded
    "remove_unused_columns",  # the loop keeps them
    "center_rewards_coefficient",  # 0 and None are both none
    "vllm_server_host",  # unset: 0.0.0.0 there, this machine here
    "vllm_server_port",  # unset: 8000
}


def own_defaults(name):
    fields = dataclasses.fields(getattr(upweight, name))
    return {one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields}


@pytest.mark.parametrize("name", RECORD["configs"])
def test_every_argument_of_a_config_is_here_with_its_default(name):
    own, theirs = own_defaults(name), RECORD["configs"][name]
    assert set(theirs) <= set(own)
    differing = {key for key, value in theirs.items() if own[key] != value}
    assert differing <= OTHER_DEFAULTS | SAME_IN_EFFECT


def test_defaults_that_differ_are_explained():
    explained = {"vllm_importance_sampling_correction": "importance sampling correction unset"}
    explained["vllm_importance_sampling_mode"] = explained["vllm_importance_sampling_correction"]
    assert [name for name in sorted(OTHER_DEFAULTS) if explained.get(name, f"`{name}") not in DIFFERENCES] == []


@pytest.mark.parametrize("name", RECORD["trainers"])
def test_every_argument_of_a_trainer_is_taken_or_has_a_reason(name):
    code = parts_for.__code__
    taken = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    init = getattr(upweight, name).__init__.__code__
    taken |= {*init.co_varnames[: init.co_argcount + init.co_kwonlyargcount]}
    assert set(RECORD["trainers"][name]) <= taken | set(NOT_TAKEN)


@pytest.mark.parametrize(
    ("name", "given", "hint"),
    [
        ("DPOConfig", {"max_lenght": 1}, "max_length"),
        ("SFTConfig", {"max_seq_length": 1}, "max_length"),
        ("GRPOConfig", {"max_seq_length": 1}, "bounded by 'max_prompt_length'"),
        ("DPOConfig", {"rpo_alpha": 1.0}, "loss_weights"),
        ("GRPOConfig", {"num_generation": 4}, "num_generations"),
        ("DPOConfig", {"max_prompt_length": 4, "max_length": 8}, "Remove it and set 'max_length'"),
        ("DPOConfig", {"max_lenght": 1, "no_cuda": True}, "max_length(.|\\n)*'no_cuda'. It is 'use_cpu'"),
        ("KTOConfig", {"generate_during_eval": True}, "Remove it"),
        ("GRPOConfig", {"vllm_device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ("DistillationConfig", {"use_teacher_server": True}, "URL as 'teacher_model_name_or_path'"),
        ("SFTConfig", {"lora_r": 8}, "peft_config=LoraConfig"),
        ("GRPOConfig", {"stop_token": "eos"}, "'generation_kwargs'"),
        ("GRPOConfig", {"num_value_samples": 4}, "upweight docs api"),
        ("CPOConfig", {"nonsense_beyond_words": 4}, "upweight docs api"),
    ],
)
def test_an_unknown_argument_of_a_config_says_what_was_meant(name, given, hint, tmp_path):
    with pytest.raises(TypeError, match=f"{name} takes no argument '{next(iter(given))}'.*{hint}"):
        getattr(upweight, name)(output_dir=tmp_path, **given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SFTConfig", {"dataset_kwargs": {"skip_prepare_dataset": True}}),
        ("RewardConfig", {"router_aux_loss_coef": 0.1}),
        ("ORPOConfig", {"generate_during_eval": True}),
        ("CPOConfig", {"is_encoder_decoder": True}),
        ("GRPOConfig", {"use_adaptive_entropy": True}),
    ],
)
def test_what_is_refused_is_refused_only_where_it_asks_for_something(name, given, tmp_path):
    (key,) = given
    with pytest.raises(UserError, match=key):
        getattr(upweight, name)(output_dir=tmp_path, **given)
    getattr(upweight, name)(output_dir=tmp_path, **{key: own_defaults(name)[key]})


def test_scripts_have_the_defaults_of_vllm_that_they_know(tmp_path):
    rollout = upweight.GRPOConfig(output_dir=tmp_path, use_vllm=True).section(RolloutSection)
    assert (rollout.vllm_mode, rollout.sleep_mode) == ("colocate", False)
    with pytest.raises(UserError, match="vllm_server_port: is for vllm_mode='server'"):
        upweight.GRPOConfig(output_dir=tmp_path, use_vllm=True, vllm_server_port=8001)
    upweight.GRPOConfig(output_dir=tmp_path, use_vllm=True, vllm_mode="server", vllm_server_port=8001)
