"""DeepSpeed ZeRO: the config for this loop, and resuming with another number of ranks."""

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
from transformers.integrations.deepspeed import (
    HfDeepSpeedConfig,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)

from upweight.config.zero import not_taken, zero_options
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.train.distributed.ranks import broadcast_from_rank0

NOT_INSTALLED = (
    "deepspeed: is not installed. `pip install deepspeed`, or use 'fsdp: true', which shards alike; on one device "
    "there is nothing to shard: remove the key."
)
# `StepRunner` splits a step into forwards: DeepSpeed sees one batch per step.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def zero_config(options_or_file: str | Mapping[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return the DeepSpeed config from a file (or the name of a shipped one) or options, for compute in `dtype`."""
    config = zero_options(options_or_file, folder)
    if refused := list(not_taken(config)):
        raise UserError("\n".join(refused))
    if config["zero_optimization"]["stage"] == 3:  # needed for saving
        config["zero_optimization"] = config["zero_optimization"] | {"stage3_gather_16bit_weights_on_model_save": True}
    config |= dict.fromkeys(BATCH_KEYS, "auto")
    config.setdefault("gradient_clipping", "auto")  # left out, DeepSpeed clips at 1
    config.setdefault("zero_allow_untested_optimizer", True)
    for key, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        options = dict(config.get(key) or {})
        if options.get("enabled") is True and dtype != kind:
            computes = str(dtype).removeprefix("torch.")
            warn_once(f"deepspeed: '{key}' of its config is off: the run computes in {computes}")
        config[key] = options | {"enabled": dtype == kind}
    return config


@contextlib.contextmanager
def zero3_partitioned_loading(config: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, with a ZeRO-3 config, weights are partitioned over the ranks as they are loaded."""
    if config is None:
        yield
        return
    require_deepspeed()
    fixed = {name: value for name, value in config.items() if value != "auto"}
    stage = {name: value for name, value in config["zero_optimization"].items() if value != "auto"}
    hf_config = HfDeepSpeedConfig({**fixed, "zero_optimization": stage, "train_micro_batch_size_per_gpu": 1})
    assert hf_config.is_zero3()
    try:
        yield
    finally:
        unset_hf_deepspeed_config()  # the loop sets it again


@contextlib.contextmanager
def without_zero3(trainer: Trainer) -> Iterator[None]:
    """Inside, transformers builds models without partitioning them, as one without weights cannot be."""
    config = getattr(trainer.args, "hf_deepspeed_config", None)
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)


def require_deepspeed() -> None:
    """Raise where DeepSpeed is missing; select its CPU backend where there is no GPU."""
    if find_spec("deepspeed") is None:
        raise UserError(NOT_INSTALLED)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def fit_to_ranks(checkpoint: Path, trainer: Trainer) -> None:
    """Convert a checkpoint of another number of ranks to DeepSpeed's universal format, and load that."""
    folder = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    wrote, ranks = len(list(folder.glob("*_optim_states.pt"))), PartialState().num_processes
    if wrote == ranks:
        return
    problem, remedy = f"resume: {wrote} ranks wrote {checkpoint}", f"go on with as many, `--num-processes {wrote}`"
    if trainer.args.load_best_model_at_end:
        problem = f"and these are {ranks}; 'load_best_model_at_end' would mix both, which DeepSpeed does not load"
        raise UserError(f"{problem}, {problem}; drop the key, or {remedy}.")
    converted = folder.with_name(f"{folder.name}_universal")
    failure = broadcast_from_rank0(_convert(folder, converted) if trainer.is_world_process_zero() else None)
    if failure is not None:
        raise UserError(f"{problem}, and DeepSpeed failed to convert it; {remedy}.\n{failure}")
    plugin = trainer.accelerator.state.deepspeed_plugin
    assert plugin is not None
    plugin.deepspeed_config["checkpoint"] = {**plugin.deepspeed_config.get("checkpoint", {}), "load_universal": True}
    if plugin.deepspeed_config["zero_optimization"]["stage"] == 3:
        trainer.add_callback(_RestoreGroupSettings(converted / "zero" / "optimizer_state.pt"))


class _RestoreGroupSettings(TrainerCallback):
    """Restores each parameter group's settings and each weight's step count, which ZeRO-3 shares after a conversion."""

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
            if "step" in values:  # a user's optimizer may count none
                values["step"] = copy.deepcopy(values["step"])


def _convert(folder: Path, converted: Path) -> str | None:
    """Convert a DeepSpeed folder to the universal format; return the error, if it fails."""
    if (folder.parent / "latest_universal").is_file():  # is written last
        return None
    shutil.rmtree(converted, ignore_errors=True)
    command = ["deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(folder), "--output_folder", str(converted)]
    done = subprocess.run([sys.executable, "-m", *command, *folders], check=False, capture_output=True, text=True)
    return done.stderr.strip()[-2000:] if done.returncode else None
