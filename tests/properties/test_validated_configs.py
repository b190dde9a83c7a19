"""What `validate` accepts is not refused by the config alone when training is put together."""

import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from transformers import Trainer, get_scheduler

from upweight.config import parse_config
from upweight.config.config import SECTIONS
from upweight.errors import UserError
from upweight.methods import METHODS
from upweight.rollout.sampling_params import build_sampling, request_options
from upweight.serve.command import serve_command
from upweight.settings import Key, keys_of
from upweight.train.arguments import training_arguments
from upweight.train.distributed.deepspeed import zero_config
from upweight.train.machine_checks import OPTIMIZER_PACKAGES

ROWS = {
    "text": "alpaca", "pairs": "chatml.intel", "labelled": "chatml.intel", "steps": "stepwise_supervised",
    "prompts": "chat_template",
}  # fmt: skip
CHOSEN = {"sft": {}, "orm": {"reward_model": True}, "prm": {"process_reward_model": True}}
EXTREMES = (0, 1, 2, 3, 7, -1, 0.1, 0.5, 1.5, 2.5, 1e-12, 1e9, 2**31 - 1)
WORDS = ("", "x", "x" * 300, "a=1,b=2", "nothing.here", "\0")
SCHEDULES = (
    {}, {"num_cycles": 2}, {"min_lr": 0.0}, {"min_lr_rate": 0.1}, {"num_decay_steps": 2}, {"power": 0.5},
    {"timescale": 3}, {"factor": 0.5}, {"lr_end": 0.0}, {"last_epoch": 3},
)  # fmt: skip


def base(name: str) -> dict[str, Any]:
    """A small config of a method."""
    method = METHODS[name]()
    content = {"base_model": "m", "datasets": [{"path": "d", "type": ROWS[method.data]}], "max_steps": 4}
    content |= CHOSEN.get(name, {"rl": name})
    if name == "ebft":
        content["ebft"] = {"mode": "structured"}
    elif name == "distill":
        content["distill"] = {"teacher": "t"}
    elif method.online:
        content["trl"] = {"reward_funcs": ["r.f"]}
    return content


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluated": {"val_set_size": 2, "load_best_model_at_end": True},
    "plateau": {"val_set_size": 2, "lr_scheduler": "reduce_lr_on_plateau"},
    "adapter": {"adapter": "lora", "lora_target_linear": True},
    "sharded": {"fsdp": True},
    "zero": {"deepspeed": {"zero_optimization": {"stage": 3}}},
}


def values_of(annotation: Any) -> set[Any]:
    """Values worth trying for a key; lists and mappings as tuples of what is in them."""
    if annotation is bool:
        return {True, False}
    if annotation in (int, float):
        return set(EXTREMES)
    if annotation is str:
        return set(WORDS)
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        return {("list", value) for value in values_of(get_args(annotation)[0])}
    if get_origin(annotation) is dict:
        return {("dict", "x"), ("dict", 1)}
    return set().union(*map(values_of, get_args(annotation)))


def written(value: Any) -> Any:
    match value:
        case ("list", inner):
            return [inner]
        case ("dict", inner):
            return {"x": inner}
        case _:
            return value


@cache
def keys_for(name: str) -> list[Key]:
    """Every key that a config of a method may set."""
    return [key for section in (*SECTIONS.values(), METHODS[name]) for key in keys_of(section)]


def changed(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    block, _, inner = path.rpartition(".")
    if not block:
        return {**content, path: value}
    return {**content, block: {**content.get(block, {}), inner: value}}


def accepted(content: dict[str, Any]):
    try:
        return parse_config(content, folder=Path())
    except UserError:
        return None


def put_together(config) -> None:
    """All of training's own assembly that needs neither weights nor data."""
    for steps_per_epoch in (1, 11):
        arguments = training_arguments(config, steps_per_epoch=steps_per_epoch, use_cpu=True)
        total = config.optim.max_steps or math.ceil(config.optim.num_epochs * steps_per_epoch)
        if config.optim.optimizer not in OPTIMIZER_PACKAGES:
            kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
            optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
            if total < 100:
                follow(optimizer, arguments, total)
    if isinstance(config.sharding.deepspeed, dict):
        zero_config(config.sharding.deepspeed, config.folder, torch.float32)
    if config.method.online:
        build_sampling(config.rollout, 8)
        request_options(config.rollout)
    if config.method.online and config.rollout.use_vllm:
        serve_command(config)


def follow(optimizer, arguments, total) -> None:
    """The learning rate from the first step to the last."""
    schedule: Any = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(total),
        num_training_steps=total,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    plateau = arguments.lr_scheduler_type == "reduce_lr_on_plateau"
    for _ in range(total):
        optimizer.step()
        schedule.step(*([1.0] if plateau else []))


def failures(contents) -> list[str]:
    found = []
    for what, content in contents:
        config = accepted(content)
        try:
            if config is not None:
                put_together(config)
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dpo" else pytest.mark.slow) for name in METHODS]
)
def test_every_key_with_every_kind_of_value(name):
    start = base(name)
    tried = [
        (f"{key.path}={value!r:.60}", changed(start, key.path, written(value)))
        for key in keys_for(name)
        for value in values_of(key.field.annotation)
        if key.path not in ("datasets", "test_datasets", "stages")
    ]
    assert accepted(start) is not None
    assert "\n".join(failures(tried)) == ""


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[] if name == "adapter" else pytest.mark.slow) for name in VARIANTS if name != "plain"],
)
def test_keys_of_training_beside_others(variant):
    start = {**base("dpo"), **VARIANTS[variant]}
    keys = [
        key for name in ("optim", "run", "callbacks", "sharding", "model", "adapter") for key in keys_of(SECTIONS[name])
    ]
    tried = [
        (f"{key.path}={value!r:.60}", changed(start, key.path, written(value)))
        for key in keys
        for value in values_of(key.field.annotation)
    ]
    assert accepted(start) is not None
    assert "\n".join(failures(tried)) == ""


def test_schedules_with_any_arguments():
    names = get_args(get_args(SECTIONS["optim"].model_fields["scheduler"].annotation)[0])
    warmups = ({}, {"warmup_ratio": 1.0}, {"warmup_steps": 1}, {"warmup_steps": 4}, {"warmup_steps": 0.9})
    lengths = ({"max_steps": 1}, {"max_steps": 4})
    tried = [
        (
            f"{name} {arguments} {warmup} {length}",
            {
                **base("dpo"), "val_set_size": 2, "lr_scheduler": name, "lr_scheduler_kwargs": arguments, **warmup,
                **length,
            },
        )
        for name, arguments, warmup, length in itertools.product(names, SCHEDULES, warmups, lengths)
    ]  # fmt: skip
    assert sum(accepted(content) is not None for _, content in tried) > 100
    assert "\n".join(failures(tried)) == ""


def test_checkpoints_and_evaluations_by_any_interval():
    saves = ({}, {"save_steps": 4}, {"save_steps": 0.5}, {"saves_per_epoch": 3}, {"save_strategy": "best"},
             {"save_strategy": "steps"}, {"save_strategy": "no"}, {"save_strategy": "epoch"})  # fmt: skip
    evaluations = ({}, {"eval_steps": 2}, {"eval_steps": 0.25}, {"evals_per_epoch": 4}, {"eval_strategy": "steps"},
                   {"eval_strategy": "no"}, {"eval_strategy": "epoch"}, {"eval_steps": 3})  # fmt: skip
    common = {**base("dpo"), "val_set_size": 2, "max_steps": 50}
    for best in ({"load_best_model_at_end": True}, {"early_stopping_patience": 2}, {}):
        tried = [
            (f"{best} {save} {look}", {**common, **best, **save, **look})
            for save, look in itertools.product(saves, evaluations)
        ]
        assert "\n".join(failures(tried)) == ""
