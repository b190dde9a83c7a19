"""Every key about optimisation and the run reaches the Trainer."""

import dataclasses
import os

import pytest
from transformers import TrainingArguments
from transformers.utils import logging as transformers_logging

from upweight.config import parse_config
from upweight.config.sections.data import DataSection
from upweight.config.sections.run import RunSection, TrackingSection
from upweight.config.sections.training import OptimSection, ShardingSection
from upweight.errors import UserError
from upweight.settings import keys_of, setting
from upweight.train.arguments import (
    NOT_PASSED_ON,
    TRACKER_VARIABLES,
    enabled_trackers,
    set_variables,
    tracking_arguments,
    training_arguments,
)

BASE = {"base_model": "tiny", "rl": "dpo", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}
EVALUATED = {"val_set_size": 8}
ONLINE = {"rl": "grpo", "trl": {"reward_funcs": ["rewards.length"]}, "datasets": [{"path": "rows.jsonl"}]}


def arguments(tmp_path, steps_per_epoch=50, **keys):
    config = parse_config({**BASE, "output_dir": str(tmp_path), **keys}, folder=tmp_path)
    return training_arguments(config, steps_per_epoch=steps_per_epoch, use_cpu=True)


def test_a_new_key_with_the_name_of_an_argument_needs_its_declaration_only(tmp_path):
    class WithKey(RunSection):
        delay: float = setting("eval_delay", 0.0, "Read by transformers.")

    config = parse_config({**BASE, "output_dir": str(tmp_path)}, folder=tmp_path)
    config = dataclasses.replace(config, run=WithKey(delay=3.0))
    assert training_arguments(config, steps_per_epoch=50, use_cpu=True).eval_delay == 3.0


# Of the loop or the engine, each tested where it acts.
ACTING_ELSEWHERE = {"gradient_checkpointing", "neftune_noise_alpha", "save_total_limit", "torch_compile"}
REACHES = [
    ({"learning_rate": 3e-4}, {"learning_rate": 3e-4}),
    ({"micro_batch_size": 3, "gradient_accumulation_steps": 5},
     {"per_device_train_batch_size": 15, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 15}),
    ({"micro_batch_size": 2, "batch_size": 8}, {"per_device_train_batch_size": 8}),
    ({"eval_batch_size": 7}, {"per_device_eval_batch_size": 7}),
    ({"num_epochs": 2.5}, {"num_train_epochs": 2.5, "max_steps": -1}),
    ({"max_steps": 9}, {"max_steps": 9}),
    ({"optimizer": "sgd"}, {"optim": "sgd"}),
    ({"optimizer": "lion"}, {"optim": "lion_32bit"}),
    ({"optimizer": "apollo_adamw", "optim_target_modules": ["q_proj", "v_proj"]},
     {"optim": "apollo_adamw", "optim_target_modules": ["q_proj", "v_proj"]}),
    ({"optimizer": "paged_adamw"}, {"optim": "paged_adamw_32bit"}),
    ({"lr_scheduler": "polynomial", "max_steps": 1}, {"warmup_steps": 0}),
    ({"lr_scheduler": "polynomial", "max_steps": 4, "warmup_ratio": 1.0}, {"warmup_steps": 3}),
    ({**EVALUATED, "lr_scheduler": "reduce_lr_on_plateau"},
     {"metric_for_best_model": "loss", "lr_scheduler_kwargs": {"mode": "min"}}),
    ({**EVALUATED, **ONLINE, "lr_scheduler": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 3}},
     {"metric_for_best_model": "reward", "lr_scheduler_kwargs": {"mode": "max", "patience": 3}}),
    ({**EVALUATED, "load_best_model_at_end": True, "saves_per_epoch": 4, "evals_per_epoch": 5},
     {"save_steps": 10, "eval_steps": 10}),
    ({"warmup_steps": 0.1, "max_steps": 50}, {"warmup_steps": 5}),
    ({"optim_args": {"a": 1, "b": "x"}}, {"optim_args": "a=1,b=x"}),
    ({"lr_scheduler": "linear"}, {"lr_scheduler_type": "linear"}),
    ({"cosine_min_lr_ratio": 0.1},
     {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
    ({"warmup_steps": 7}, {"warmup_steps": 7}),
    ({"warmup_ratio": 0.1, "num_epochs": 2}, {"warmup_steps": 10}),
    ({"num_epochs": 2}, {"warmup_steps": 3}),
    ({"max_steps": 100_000}, {"warmup_steps": 100}),
    ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    ({"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
     {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}),
    ({"max_grad_norm": 0.5}, {"max_grad_norm": 0.5}),
    ({"full_determinism": True}, {"full_determinism": True}),
    ({**EVALUATED, "eval_on_start": True}, {"eval_on_start": True}),
    ({**EVALUATED, "eval_samples": 2}, {"eval_on_start": True}),
    ({"seed": 7}, {"seed": 7, "data_seed": 7}),
    ({"seed": 7, "data_seed": 3}, {"seed": 7, "data_seed": 3}),
    ({"torch_empty_cache_steps": 4}, {"torch_empty_cache_steps": 4}),
    ({"ddp_timeout": 99}, {"ddp_timeout": 99}),
    ({"ddp_bucket_cap_mb": 30}, {"ddp_bucket_cap_mb": 30}),
    ({"ddp_broadcast_buffers": True}, {"ddp_broadcast_buffers": True}),
    ({"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3},
     {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}),
    ({"dataloader_drop_last": True}, {"dataloader_drop_last": True}),
    ({"logging_steps": 4}, {"logging_steps": 4}),
    ({"max_steps": 1000}, {"logging_steps": 5}),
    ({"max_steps": 100_000}, {"logging_steps": 10}),
    ({}, {"logging_steps": 1, "save_strategy": "epoch", "eval_strategy": "no", "report_to": [], "bf16": False,
          "logging_nan_inf_filter": False, "load_best_model_at_end": False, "push_to_hub": False}),
    ({"save_steps": 5}, {"save_strategy": "steps", "save_steps": 5}),
    ({"save_steps": 0.25}, {"save_steps": 0.25}),
    ({"saves_per_epoch": 4}, {"save_strategy": "steps", "save_steps": 12}),
    ({"save_strategy": "no"}, {"save_strategy": "no"}),
    ({"save_only_model": True}, {"save_only_model": True}),
    ({**EVALUATED}, {"eval_strategy": "epoch"}),
    ({**EVALUATED, "eval_steps": 6}, {"eval_strategy": "steps", "eval_steps": 6}),
    ({**EVALUATED, "evals_per_epoch": 5}, {"eval_strategy": "steps", "eval_steps": 10}),
    ({**EVALUATED, "eval_strategy": "no"}, {"eval_strategy": "no"}),
    ({**EVALUATED, "load_best_model_at_end": True},
     {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}),
    ({**EVALUATED, "load_best_model_at_end": True, "metric_for_best_model": "rewards/accuracies"},
     {"metric_for_best_model": "rewards/accuracies", "greater_is_better": True}),
    ({**EVALUATED, "load_best_model_at_end": True, "greater_is_better": True}, {"greater_is_better": True}),
    ({**EVALUATED, "early_stopping_patience": 2}, {"load_best_model_at_end": False, "metric_for_best_model": "loss"}),
    ({**EVALUATED, **ONLINE, "load_best_model_at_end": True},
     {"metric_for_best_model": "reward", "greater_is_better": True}),
    ({**EVALUATED, **ONLINE, "save_strategy": "best"}, {"metric_for_best_model": "reward"}),
    ({**EVALUATED, "save_strategy": "best"}, {"save_strategy": "best", "metric_for_best_model": "loss"}),
    ({"hub_model_id": "me/model", "hub_strategy": "every_save", "hub_revision": "next"},
     {"push_to_hub": True, "hub_model_id": "me/model", "hub_strategy": "every_save", "hub_revision": "next",
      "hub_private_repo": True}),
    ({"hub_model_id": "me/model", "hub_private_repo": False}, {"hub_private_repo": False}),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "expected"), REACHES, ids=lambda value: ",".join(value) if value else "nothing")
def test_a_key_reaches_the_trainer(keys, expected, tmp_path):
    made = arguments(tmp_path, **keys)
    assert {name: getattr(made, name) for name in expected} == expected


def test_every_key_with_the_name_of_an_argument_is_shown_to_reach_it():
    """Some arguments are set by the loop, or read by nothing here: a key of that name would be accepted and ignored."""
    arguments = {field.name for field in dataclasses.fields(TrainingArguments)} - NOT_PASSED_ON
    sections = (RunSection, OptimSection, ShardingSection, DataSection)
    declared = {key.path for section in sections for key in keys_of(section)} & arguments
    shown = {key for keys, expected in REACHES for key in keys if key in expected}
    assert declared - shown == {"output_dir", *ACTING_ELSEWHERE}


def test_every_rank_is_as_quiet_as_the_first(tmp_path, monkeypatch):
    made = arguments(tmp_path)
    monkeypatch.setattr(type(made), "should_log", False)  # as on another rank
    transformers_logging.set_verbosity_error()
    assert made.get_process_log_level() == transformers_logging.ERROR


def test_what_the_trainer_refuses_is_a_user_error(tmp_path):
    config = parse_config({**BASE, **EVALUATED, "eval_steps": 3}, folder=tmp_path)
    config = dataclasses.replace(config, run=config.run.model_copy(update={"load_best": True}))  # no rule has seen it
    with pytest.raises(UserError, match="transformers does not take these settings together"):
        training_arguments(config, steps_per_epoch=5, use_cpu=True)


def test_none_is_the_default_and_a_project_turns_wandb_on():
    assert enabled_trackers(TrackingSection()) == []
    assert enabled_trackers(TrackingSection(wandb_project="p")) == ["wandb"]
    assert enabled_trackers(TrackingSection(wandb_project="p", wandb=False)) == []
    assert enabled_trackers(TrackingSection(wandb_project="p", wandb_mode="disabled")) == []
    assert enabled_trackers(TrackingSection(wandb_project="p", wandb_mode="offline")) == ["wandb"]
    assert enabled_trackers(TrackingSection(mlflow=True, trackio=True)) == ["mlflow", "trackio"]
    assert enabled_trackers(TrackingSection(comet=True, swanlab=True)) == ["comet_ml", "swanlab"]


def test_settings_become_the_variables_that_trackers_read(monkeypatch):
    for variable in (*TRACKER_VARIABLES, "HF_MLFLOW_LOG_ARTIFACTS"):
        monkeypatch.setenv(variable, "before")
    set_variables(TrackingSection(wandb_project="p", wandb_mode="offline", mlflow_uri="file:x", mlflow_artifacts=True))
    found = {name: os.environ[name] for name in ("WANDB_PROJECT", "WANDB_MODE", "MLFLOW_TRACKING_URI", "WANDB_ENTITY")}
    assert found == {"WANDB_PROJECT": "p", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:x",
                     "WANDB_ENTITY": "before"}  # fmt: skip
    assert os.environ["HF_MLFLOW_LOG_ARTIFACTS"] == "1"


def test_comet_and_swanlab_read_theirs(monkeypatch):
    names = ("COMET_PROJECT_NAME", "COMET_START_ONLINE", "COMET_AUTO_LOG_CODE", "COMET_OFFLINE_DIRECTORY")
    names += ("SWANLAB_PROJECT", "SWANLAB_MODE", "SWANLAB_DESCRIPTION")
    for variable in names:
        monkeypatch.setenv(variable, "before")
    options = {"log_code": False, "offline_directory": "here"}
    set_variables(TrackingSection(comet=True, comet_project="p", comet_online=False, comet_options=options))
    set_variables(TrackingSection(swanlab=True, swanlab_project="s", swanlab_mode="local"))
    assert [os.environ[name] for name in names] == ["p", "False", "False", "here", "s", "local", "before"]
    section = TrackingSection(swanlab=True, swanlab_experiment="mine")
    assert tracking_arguments(section) == {"report_to": ["swanlab"], "run_name": "mine"}


def test_names_reach_the_tracker_that_is_on():
    section = TrackingSection(trackio=True, trackio_run="r", trackio_project="p", trackio_space="me/s", wandb_name="w")
    assert tracking_arguments(section) == {
        "report_to": ["trackio"], "run_name": "r", "project": "p", "trackio_space_id": "me/s",
    }  # fmt: skip
    assert tracking_arguments(TrackingSection()) == {"report_to": "none", "run_name": None}
