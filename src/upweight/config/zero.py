"""Reads DeepSpeed options from the config, from a JSON file, or from a file that ships with this package."""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from upweight.config.config import Config
from upweight.config.peers import ZERO_NOT_TAKEN
from upweight.errors import UserError

SHIPPED_FOLDER = "deepspeed_configs"  # folder of the files that ship with this package, named as in other trainers


def zero_options(source: str | Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options, read from a file if `source` is a path."""
    if not isinstance(source, str):
        return dict(source)
    file = zero_file(source, folder)
    if file is None:
        ready = f"{', '.join(ready_configs())}, such as 'deepspeed: {SHIPPED_FOLDER}/zero3_bf16.json'"
        raise UserError(f"deepspeed: there is no file {source}. Ready ones are {ready}.")
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"deepspeed: {source} is no JSON: {error}.") from None
    if not isinstance(options, dict):
        raise UserError(f"deepspeed: {source} is not a JSON object with options.")
    return options


def unread_options(config: Config) -> Iterator[str]:
    """Yield what stops the file of DeepSpeed's options from being read, in a config or its stages."""
    for stage in config.stages or (config,):
        try:
            zero_options(stage.sharding.deepspeed or {}, stage.folder)
        except UserError as error:
            yield str(error)


def zero_file(name: str, folder: Path) -> Any | None:
    """Look for a JSON file from the config's folder, the working directory and the files of this package."""
    path = Path(name).expanduser()
    candidates: list[Any] = [folder / path, path]
    if path.parent.name in (SHIPPED_FOLDER, ""):
        candidates.append(files("upweight.config").joinpath(SHIPPED_FOLDER, path.name))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def ready_configs() -> list[str]:
    """Return the names of the DeepSpeed configs that ship with this package."""
    return sorted(entry.name for entry in files("upweight.config").joinpath(SHIPPED_FOLDER).iterdir())


def zero_stage(options: Mapping[str, Any]) -> Any:
    """Return the ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also weights."""
    stage = options.get("zero_optimization")
    return stage.get("stage", 0) if isinstance(stage, Mapping) else 0


def not_taken(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each DeepSpeed option that conflicts with the training loop, or that it needs."""
    for key, why in ZERO_NOT_TAKEN.items():
        if key in options:
            yield f"deepspeed: '{key}' is not taken: {why}."
    if zero_stage(options) not in (1, 2, 3):
        yield "deepspeed: 'zero_optimization.stage' has to be 1, 2 or 3; plain data parallelism needs no file."
    for key in ("bf16", "fp16"):
        if not isinstance(options.get(key) or {}, Mapping):
            yield f"deepspeed: '{key}' is a mapping such as {{'enabled': 'auto'}}; `bf16` and `fp16` set the precision."
