"""DeepSpeed's ZeRO: the config that a run names, fitted to this loop."""

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from upweight.errors import UserError
from upweight.log import warn_once

READY = "deepspeed_configs"  # the folder of this package, and the name that other trainers give theirs
# What one loader item is, and how it is cut, is this loop's business: DeepSpeed sees one batch a step.
OURS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
REFUSED = {
    "optimizer": "name it in the run's own config (`optimizer`)",
    "scheduler": "name it in the run's own config (`lr_scheduler`)",
    "amp": "precision follows `bf16` and `fp16`",
    "tensor_parallel": "layers are not split here; use ZeRO-3",
}


def zero_config(given: str | Mapping[str, Any], folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is handed: a file (one of ours by its name) or options, for weights computed in `dtype`."""
    config = dict(_read(given, folder) if isinstance(given, str) else given)
    refused = [f"deepspeed: '{key}' is not taken: {why}." for key, why in REFUSED.items() if key in config]
    stage = dict(config.get("zero_optimization") or {})
    if stage.get("stage", 0) not in (1, 2, 3):
        refused.append(
            "deepspeed: 'zero_optimization.stage' has to be 1, 2 or 3; plain data parallelism needs no file."
        )
    if refused:
        raise UserError("\n".join(refused))
    if stage["stage"] == 3:
        stage["stage3_gather_16bit_weights_on_model_save"] = True  # else nothing could be saved
    config["zero_optimization"] = stage
    config |= dict.fromkeys(OURS, "auto")
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


def ready_configs() -> list[str]:
    """Names of the configs that come with this package."""
    return sorted(entry.name for entry in files("upweight.train").joinpath(READY).iterdir())


def _read(name: str, folder: Path) -> dict[str, Any]:
    """A JSON file, looked for from the config's folder, from here, and among those of this package."""
    asked = Path(name).expanduser()
    for path in (folder / asked, asked):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            break
    else:
        own = files("upweight.train").joinpath(READY, asked.name)
        ours = asked.parent.name in (READY, "") and own.is_file()
        if not ours:
            raise UserError(
                f"deepspeed: there is no file {name}. Ready ones are {', '.join(ready_configs())}, such as "
                f"'deepspeed: {READY}/zero3_bf16.json'."
            )
        text = own.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"deepspeed: {name} is no JSON: {error}") from None
