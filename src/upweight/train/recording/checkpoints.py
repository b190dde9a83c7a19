"""Complete checkpoints: marking, finding and deleting them.

The Trainer writes file by file. We write a list of the files and their sizes last, atomically, and only then delete
older checkpoints. A checkpoint without that list, or that does not match it, is incomplete and is skipped.
"""

import json
import os
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import logger

WHOLE = "whole.json"


def mark_whole(folder: Path) -> None:
    """Mark a checkpoint as complete, after its files are flushed to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != WHOLE)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    write_text(folder / WHOLE, json.dumps(sizes, indent=0))


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint holds every file that was written to it, at its full size."""
    try:
        sizes = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else None


def checkpoints_of(run_folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint of a run, complete or not, newest first."""
    checkpoints = [(step, path) for path in run_folder.glob("checkpoint-*") if (step := step_of(path)) is not None]
    return sorted(checkpoints, reverse=True)


def last_whole_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; warn of damaged ones."""
    for _, folder in checkpoints_of(run_folder):
        if is_whole(folder):
            return folder
        logger.warning("warning: %s is damaged or was cut off while it was written; passing it over", folder)
    return None


def named_checkpoint(path: str) -> Path:
    """Return the checkpoint that the user named; raise where it is not complete."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"resume_from_checkpoint: there is no folder {folder}")
    if step_of(folder) is None:
        raise UserError(f"resume_from_checkpoint: {folder} is no checkpoint; name one of its checkpoint-N folders")
    if not is_whole(folder):
        raise UserError(f"resume_from_checkpoint: {folder} is damaged or was cut off; name another, or use --resume")
    return folder


def checkpoint_to_resume(resume_from: str | bool | Path | None, run_folder: Path) -> Path | None:
    """Return the checkpoint to resume from: the named folder, or with True the last complete one of the run."""
    if not resume_from:
        return None
    if resume_from is not True:
        folder = Path(resume_from).expanduser()
        if (folder / WHOLE).exists() and not is_whole(folder):
            raise UserError(f"resume_from_checkpoint: {folder} is damaged or was cut off; name another.")
        return folder
    folders = [folder for _, folder in checkpoints_of(run_folder)]
    if any((folder / WHOLE).exists() for folder in folders):
        checkpoint = last_whole_checkpoint(run_folder)
    else:  # an earlier version marked none and wrote this file last
        checkpoint = next((folder for folder in folders if (folder / "trainer_state.json").is_file()), None)
        if checkpoint is not None:
            logger.warning("warning: %s has no %s: an earlier version wrote it, or it was cut off", checkpoint, WHOLE)
    if checkpoint is None:
        raise UserError(f"resume_from_checkpoint: {run_folder} has no whole checkpoint.")
    return checkpoint


def set_aside(run_folder: Path, step: int) -> None:
    """Move checkpoints after `step` to a folder `superseded-N`, so that a later resume does not use them."""
    later = [folder for number, folder in checkpoints_of(run_folder) if number > step]
    if not later:
        return
    place = next(path for n in count(1) if not (path := run_folder / f"superseded-{n}").exists())
    place.mkdir()
    for folder in later:
        folder.rename(place / folder.name)
    logger.warning("warning: %d checkpoints after step %d are now in %s", len(later), step, place)


class KeepCheckpoints(TrainerCallback):
    """Marks each checkpoint once all ranks have written it, then deletes the oldest beyond `limit`."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ranks = PartialState()
        ranks.wait_for_everyone()
        run_folder = Path(args.output_dir)
        folder = run_folder / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            mark_whole(folder)
            best = state.best_model_checkpoint and Path(state.best_model_checkpoint).resolve()
            beyond = [] if self.limit is None else checkpoints_of(run_folder)[self.limit :]
            for old in (path for _, path in beyond if path.resolve() != best):
                (old / WHOLE).unlink(missing_ok=True)  # a half-deleted folder must not count as complete
                shutil.rmtree(old)
        ranks.wait_for_everyone()


class SaveFirstStep(TrainerCallback):
    """Saves a checkpoint after the first step, to test early that saving works."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or state.global_step == 1
