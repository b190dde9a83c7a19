"""Checkpoints that are whole or do not count.

The Trainer writes a checkpoint file by file. Its list of files and sizes is written last, to a temporary name and
renamed: a checkpoint without that list, or that does not match it, was cut off and is passed over.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from upweight.errors import UserError
from upweight.log import logger

WHOLE = "whole.json"


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def mark_whole(folder: Path) -> None:
    """Note that everything in a checkpoint has been written."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_text(folder / WHOLE, json.dumps(sizes, indent=0))


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint holds every file that was written to it, at its full size."""
    try:
        sizes = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def steps_of(folder: Path) -> int | None:
    """The step a checkpoint folder is named after."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else None


def last_whole_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole checkpoint of a run; damaged ones are named in a warning."""
    found = [(step, path) for path in run_folder.glob("checkpoint-*") if (step := steps_of(path)) is not None]
    for _, folder in sorted(found, reverse=True):
        if is_whole(folder):
            return folder
        logger.warning("warning: %s is damaged or was cut off while it was written; passing it over", folder)
    return None


def named_checkpoint(path: str) -> Path:
    """A checkpoint the user named, which has to be whole."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"resume_from_checkpoint: there is no folder {folder}")
    if not is_whole(folder):
        raise UserError(f"resume_from_checkpoint: {folder} is damaged or was cut off; name another, or use --resume")
    return folder


class MarkWhole(TrainerCallback):
    """Marks each checkpoint once the Trainer has written all of it."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            mark_whole(folder)
