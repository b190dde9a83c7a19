"""DeepSpeed's ZeRO: the config that a run names, fitted to this loop."""

import contextlib
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from upweight.config.zero import not_taken, zero_options
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.train.distributed.ranks import broadcast_from_rank0

# What one loader item is, and how it is cut, is this loop's business: DeepSpeed sees one batch a step.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def zero_config(given: str | Mapping[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is handed: a file (one of ours by its name) or options, for weights computed in `dtype`."""
    config = zero_options(given, folder)
    if refused := list(not_taken(config)):
        raise UserError("\n".join(refused))
    stage = dict(config["zero_optimization"])
    if stage["stage"] == 3:
        stage["stage3_gather_16bit_weights_on_model_save"] = True  # else nothing could be saved
    config["zero_optimization"] = stage
    config |= dict.fromkeys(BATCH_KEYS, "auto")
    config.setdefault("gradient_clipping", "auto")  # left out, DeepSpeed clips at 1
    config.setdefault("zero_allow_untested_optimizer", True)
    for key, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        options = dict(config.get(key) or {})
        if options.get("enabled") is True and dtype != kind:
            warn_once(
                f"deepspeed: '{key}' of its config is off: the run computes in {str(dtype).removeprefix('torch.')}"
            )
        config[key] = options | {"enabled": dtype == kind}
    return config


@contextlib.contextmanager
def zero3_partitioned_loading(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, given a config of ZeRO-3, the ranks share out each weight as it is loaded: none holds them all."""
    if config is None:
        yield
        return
    require_deepspeed()
    fixed = {name: value for name, value in config.items() if value != "auto"}
    stage = {name: value for name, value in config["zero_optimization"].items() if value != "auto"}
    told = HfDeepSpeedConfig({**fixed, "zero_optimization": stage, "train_micro_batch_size_per_gpu": 1})
    assert told.is_zero3()
    try:
        yield
    finally:
        unset_hf_deepspeed_config()  # the loop will tell transformers again


def zero_arguments(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What TrainingArguments has to know."""
    require_deepspeed()
    return {"deepspeed": dict(config), "bf16": dtype == torch.bfloat16}


def require_deepspeed() -> None:
    """Raise where DeepSpeed is missing; have it use the CPU where there is no GPU."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "deepspeed: is not installed. `pip install deepspeed`, or use 'fsdp: true', which shards alike."
        )
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def fit_to_ranks(checkpoint: Path, trainer: Trainer) -> None:
    """Before training goes on from a checkpoint of another number of ranks: have DeepSpeed convert and load it so."""
    folder = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    wrote, ranks = len(list(folder.glob("*_optim_states.pt"))), PartialState().num_processes
    if wrote == ranks:
        return
    remedy = f"go on with as many, `--num-processes {wrote}`"
    if trainer.args.load_best_model_at_end:
        raise UserError(
            f"resume: {wrote} ranks wrote {checkpoint}, and these are {ranks}; 'load_best_model_at_end' would mix the "
            f"checkpoints of both, which DeepSpeed does not load; drop the key, or {remedy}."
        )
    failure = broadcast_from_rank0(_convert(folder) if trainer.is_world_process_zero() else None)
    if failure is not None:
        raise UserError(
            f"resume: {wrote} ranks wrote {checkpoint}, and DeepSpeed failed to convert it; {remedy}.\n{failure}"
        )
    plugin = trainer.accelerator.state.deepspeed_plugin
    assert plugin is not None
    plugin.deepspeed_config["checkpoint"] = {**plugin.deepspeed_config.get("checkpoint", {}), "load_universal": True}
    if plugin.deepspeed_config["zero_optimization"]["stage"] == 3:
        trainer.add_callback(_RestoreGroupSettings(_converted(folder) / "zero" / "optimizer_state.pt"))


class _RestoreGroupSettings(TrainerCallback):
    """Mends what ZeRO-3 loads of a converted checkpoint: one count of steps for all weights, one group's settings."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        while hasattr(optimizer, "optimizer"):  # accelerate's around DeepSpeed's around torch's
            optimizer = optimizer.optimizer
        saved = torch.load(self._file, map_location="cpu", weights_only=False)["param_groups"]
        for group, kept in zip(optimizer.param_groups, saved, strict=True):
            group |= {name: value for name, value in kept.items() if name != "params"}
        for values in optimizer.state.values():
            values["step"] = copy.deepcopy(values["step"])


def _converted(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}_universal")


def _convert(folder: Path) -> str | None:
    """Write a folder of DeepSpeed's beside it in the form that any number of ranks loads; the error, if it fails."""
    if (folder.parent / "latest_universal").is_file():  # is written last
        return None
    converted = _converted(folder)
    shutil.rmtree(converted, ignore_errors=True)
    command = ["deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    places = ["--input_folder", str(folder), "--output_folder", str(converted)]
    done = subprocess.run([sys.executable, "-m", *command, *places], check=False, capture_output=True, text=True)
    return done.stderr.strip()[-2000:] if done.returncode else None
