"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated, Any

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set: trl.beta=0.01.")]
TrainedTarget = Annotated[str, typer.Argument(metavar="CONFIG|FOLDER", help="Config that trained it, or its folder.")]
Processes = Annotated[
    int | None, typer.Option("--num-processes", min=1, help="Processes on this machine; default: one for each GPU.")
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folder, or its config; several to compare.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def gib(text: str) -> float:
    """Read the memory of a GPU."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 1 <= size < float("inf"):
        raise typer.BadParameter(f"got {text!r}; write GiB as a number, e.g. 8")
    return size


# `--trl.beta 0.1`, as other trainers write it, is an override too.
TAKES_OVERRIDES: dict[str, Any] = {"context_settings": {"ignore_unknown_options": True}}
