"""DeepSpeed's options that a config names: by themselves, in a file, or in one of the files that come with us."""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from upweight.errors import UserError

READY = "deepspeed_configs"  # the folder of this package, and the name that other trainers give theirs
NOT_TAKEN = {
    "optimizer": "name it in the run's own config (`optimizer`)",
    "scheduler": "name it in the run's own config (`lr_scheduler`)",
    "amp": "precision follows `bf16` and `fp16`",
    "tensor_parallel": "layers are not split here; use ZeRO-3",
}


def zero_options(given: str | Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options, read where a file is named."""
    if not isinstance(given, str):
        return dict(given)
    file = zero_file(given, folder)
    if file is None:
        raise UserError(
            f"deepspeed: there is no file {given}. Ready ones are {', '.join(ready_configs())}, such as "
            f"'deepspeed: {READY}/zero3_bf16.json'."
        )
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"deepspeed: {given} is no JSON: {error}.") from None
    if not isinstance(options, dict):
        raise UserError(f"deepspeed: {given} holds no options, which are a JSON object.")
    return options


def zero_file(name: str, folder: Path) -> Any | None:
    """A JSON file, looked for from the config's folder, from here, and among those of this package."""
    asked = Path(name).expanduser()
    places: list[Any] = [folder / asked, asked]
    if asked.parent.name in (READY, ""):
        places.append(files("upweight.config").joinpath(READY, asked.name))
    return next((place for place in places if place.is_file()), None)


def ready_configs() -> list[str]:
    """Names of the configs that come with this package."""
    return sorted(entry.name for entry in files("upweight.config").joinpath(READY).iterdir())


def zero_stage(options: Mapping[str, Any]) -> Any:
    """What DeepSpeed cuts: optimizer states (1), gradients too (2), weights too (3)."""
    stage = options.get("zero_optimization")
    return stage.get("stage", 0) if isinstance(stage, Mapping) else 0


def not_taken(options: Mapping[str, Any]) -> Iterator[str]:
    """What this loop does itself, or cannot do without."""
    for key, why in NOT_TAKEN.items():
        if key in options:
            yield f"deepspeed: '{key}' is not taken: {why}."
    if zero_stage(options) not in (1, 2, 3):
        yield "deepspeed: 'zero_optimization.stage' has to be 1, 2 or 3; plain data parallelism needs no file."
    for key in ("bf16", "fp16"):
        if not isinstance(options.get(key) or {}, Mapping):
            yield (
                f"deepspeed: '{key}' is a mapping such as {{'enabled': 'auto'}}; precision follows the run's own keys."
            )


def partitions_weights(given: str | Mapping[str, Any] | None, folder: Path) -> bool:
    """Whether DeepSpeed, if it is asked for, cuts weights too and not only what the optimizer keeps: ZeRO-3."""
    return given is not None and zero_stage(zero_options(given, folder)) == 3
