"""The files of a run folder besides checkpoints: the resolved config, and one line of metrics per log."""

import json
import math
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback

from upweight.config import Config
from upweight.config.config import SECTIONS
from upweight.config.redact import redacted
from upweight.config.sections.run import RunSection, TrackingSection
from upweight.errors import UserError
from upweight.files import write_text
from upweight.runs.files import CONFIG, METRICS, metrics_of
from upweight.settings import Section, keys_of

TRAINED = (  # keys that decide which weights are trained, and the optimizer states
    *("adapter", "lora_r", "lora_rank_pattern", "lora_target_modules", "lora_target_linear", "lora_target_parameters"),
    *("lora_modules_to_save", "peft_layers_to_transform", "peft_layers_pattern", "peft_use_dora"),
    *("peft_init_lora_weights", "unfrozen_parameters", "reward_model", "process_reward_model", "optimizer"),
    *("tokens", "resize_token_embeddings_to_32x"),  # not base_model, whose folder may have moved
)
FOLDED = ("batch_size",)  # keys that are resolved into other keys


def write_config(config: Config, folder: Path) -> None:
    """Write the config with every default filled in, as YAML that repeats the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, yaml.safe_dump(content_of(config), sort_keys=False, allow_unicode=True))


def changed_keys(config: Config, folder: Path) -> list[str]:
    """Return the keys that affect training and have changed since the run in `folder` started."""
    if not (folder / CONFIG).exists():
        return []
    before = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    now = yaml.safe_load(yaml.safe_dump(content_of(config)))
    paths = [key.path for section in (RunSection, TrackingSection) for key in keys_of(section)]
    return [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in paths]


def refuse_other_weights(changed: Iterable[str], checkpoint: Path | None, scheduler: str) -> None:
    """Raise where changed keys do not fit the weights, optimizer or learning rate of the checkpoint."""
    if "learning_rate" in changed and scheduler == "reduce_lr_on_plateau":
        raise UserError(
            f"resume: learning_rate set otherwise than when the run began, and with 'reduce_lr_on_plateau' the rate is "
            f"what {checkpoint} says it has come to. Set it as in the run's config.yaml, or begin a new run."
        )
    if keys := [key for key in changed if key in TRAINED]:
        raise UserError(
            f"resume: {', '.join(keys)} set otherwise than when the run began, and {checkpoint} holds what was trained "
            "then. Set it as in the run's config.yaml, or begin a new run in another output_dir."
        )


def content_of(config: Config) -> dict[str, Any]:
    """Return every value that the run reads, nested by YAML key, without credentials."""
    off = set() if config.method.online else {"rollout", "vllm", "gym", "environment"}
    content: dict[str, Any] = {}
    for name in (*SECTIONS, "method"):
        # kinds of environments refuse each other's keys
        only = config.set_keys if name == "environment" else None
        if name not in off:
            put_section(content, getattr(config, name), only)
    for row in (*content.get("datasets", ()), *content.get("test_datasets", ())):
        if row.get("path") and (config.folder / row["path"]).exists():  # the copy lies in another folder
            row["path"] = str((config.folder / row["path"]).resolve())
    idle = (
        *(("lora", "peft") if config.adapter.kind is None else ()),
        *(("fsdp",) if not config.sharding.fsdp else ()),
        *(("sequence_len",) if config.method.online and not config.method.strided else ()),
    )
    return redacted({key: value for key, value in content.items() if not key.startswith(idle)})


def put_section(content: dict[str, Any], section: Section, only: Container[str] | None = None) -> None:
    """Write the set values of a section into nested mappings by YAML key; `only` these paths, if set."""
    for key in keys_of(type(section)):
        owner: Any = section
        for part in key.where:
            owner = getattr(owner, part)
        # Values of a script's arguments may have other types than the key.
        shown = owner.model_dump(mode="json", exclude_none=True, include={key.name}, warnings=False)
        value = shown.get(key.name)
        left_out = key.path != key.canonical or key.path in FOLDED or (only is not None and key.path not in only)
        if left_out or value in (None, {}, []):
            continue
        *blocks, last = key.path.split(".")
        place = content
        for block in blocks:
            place = place.setdefault(block, {})
        place[last] = value


def cut_metrics(folder: Path, step: int) -> None:
    """Delete the metrics after `step` and an incomplete last line."""
    if (folder / METRICS).exists():
        kept = [row for row in metrics_of(folder) if row.get("step", 0) <= step]
        write_text(folder / METRICS, "".join(json.dumps(row) + "\n" for row in kept))


class MetricsFile(TrainerCallback):
    """Appends one flat JSON object for each log."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        line = _line(kwargs["logs"], state)
        if line is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


class MetricsOut(TrainerCallback):
    """Prints the same JSON to standard output, for other programs."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        line = _line(kwargs["logs"], state)
        if line is not None:
            print(line, flush=True)


def _line(logs: Mapping[str, Any], state: Any) -> str | None:
    """Return a log as JSON; None on other ranks and for the Trainer's final summary."""
    if not state.is_world_process_zero or "train_runtime" in logs:
        return None
    return json.dumps({"step": state.global_step, **{name: _number(value) for name, value in logs.items()}})


def _number(value: Any) -> Any:
    """Return NaN and infinity as text, since JSON has neither."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
