"""The checkpoints of a run folder, read without torch: marked when complete, checked, located and set aside."""

import hashlib
import json
import os
import re
from itertools import count, islice
from pathlib import Path

import xxhash

from upweight.errors import UserError, closest
from upweight.files import write_text
from upweight.log import counted, logger
from upweight.runs.files import MOST_LISTED, MOST_LOOKED_AT, read_json

WHOLE, DATA = "whole.json", "data.json"
MERGED, MERGE_SOURCE = "merged", "merged_from.json"


def mark_whole(folder: Path) -> None:
    """Mark a folder as complete by a list of its files, with sizes and checksums, written last and atomically."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != WHOLE)
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    entries = {str(path.relative_to(folder)): [path.stat().st_size, checksum(path)] for path in files}
    write_text(folder / WHOLE, json.dumps(entries, indent=0))


def damage(folder: Path) -> str | None:
    """Return what is wrong with a folder's files, or None where they are those that were written."""
    try:
        entries = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return f"it has no readable {WHOLE}: its writing was cut off"
    if not isinstance(entries, dict) or not entries:
        return f"its {WHOLE} lists no files"
    for name, entry in entries.items():
        match entry:
            case [int(size), str(expected)]:
                pass
            case int(size):  # a checkpoint without checksums
                expected = None
            case _:
                return f"its {WHOLE} lists no files"
        path = folder / name
        try:
            if not path.is_file() or path.stat().st_size != size:
                return f"{name} is missing or has another size than was written"
            if expected is not None and checksum(path) != expected:
                return f"{name} holds other bytes than were written"
        except (OSError, ValueError) as error:  # a bad sector; a name that no file can have
            return f"{name} cannot be read: {error}"
    return None


def is_whole(folder: Path) -> bool:
    """Whether a folder holds every file that was written to it, byte by byte."""
    return damage(folder) is None


def checksum(path: Path) -> str:
    """Return a fast hash of a file's bytes, which are read in blocks."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_merge_source(merged: Path, adapter: Path) -> None:
    """Note in a merged model which adapter it was made of."""
    file = _adapter_weights(adapter)
    source = {"adapter": str(adapter.resolve()), "checksum": checksum(file) if file else None}
    write_text(merged / MERGE_SOURCE, json.dumps(source))


def holds_adapter(model: Path, adapter: Path) -> bool:
    """Return whether a model was merged from the adapter in a folder."""
    source = read_json(model / MERGE_SOURCE)
    file = _adapter_weights(adapter)
    if not source or file is None:
        return False
    return source.get("adapter") == str(adapter.resolve()) or source.get("checksum") == checksum(file)


def merge_is_stale(merged: Path) -> bool:
    """Return whether the adapter that a merged model was made of has been trained again since."""
    source = read_json(merged / MERGE_SOURCE)
    file = _adapter_weights(Path(source.get("adapter") or merged.parent)) or _adapter_weights(merged.parent)
    made = merged / "config.json"
    if file is None or not made.is_file():
        return False
    if source.get("checksum"):
        return checksum(file) != source["checksum"]
    # Merged before sources were noted; a checkpoint lies beside an adapter too, and is none.
    return merged.name == MERGED and file.stat().st_mtime > made.stat().st_mtime


def _adapter_weights(folder: Path) -> Path | None:
    names = ("adapter_model.safetensors", "adapter_model.bin")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a checkpoint folder."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match[1]) if match else None


def checkpoints_of(run_folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of every checkpoint of a run, complete or not, newest first."""
    checkpoints = [(step, path) for path in run_folder.glob("checkpoint-*") if (step := step_of(path)) is not None]
    return sorted(checkpoints, reverse=True)


def marked_checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """Return those that are marked as complete, newest first; their files are not read."""
    return [(step, folder) for step, folder in checkpoints_of(run_folder) if (folder / WHOLE).is_file()]


def newest_marked(run_folder: Path) -> int | None:
    """Return the step of the newest checkpoint that is marked as complete."""
    return next((step for step, _ in marked_checkpoints(run_folder)), None)


def nothing_to_resume(run_folder: Path) -> str | None:
    """Return the message about a run without any checkpoint, with folders near it that have some; None where it has."""
    if checkpoints_of(run_folder):
        return None
    is_stage = re.fullmatch(r"stage-\d+-.+", run_folder.name) is not None
    run = run_folder.parent if is_stage else run_folder  # the user named this one
    patterns = ("*/checkpoint-*", "*/stage-*/checkpoint-*")
    there = islice((path for pattern in patterns for path in sorted(run.parent.glob(pattern))), MOST_LOOKED_AT)
    others = [path.parent.parent if path.parent.name.startswith("stage-") else path.parent for path in there]
    names = [str(path) for path in dict.fromkeys(others) if path != run]
    state = "has no checkpoint" if run_folder.is_dir() else "does not exist"
    near = closest(run.name, (Path(name).name for name in names))
    meant = next((f" Did you mean output_dir={name}?" for name in names if Path(name).name == near), "")
    listed = ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")
    known = f" Runs with checkpoints beside it: {listed}." if names else ""
    return f"nothing to resume: {run_folder} {state}, so this run starts from the beginning.{known}{meant}"


def last_whole_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; warn of damaged ones."""
    for _, folder in checkpoints_of(run_folder):
        if (reason := damage(folder)) is None:
            return folder
        logger.warning("warning: %s is passed over: %s", folder, reason)
    return None


def refuse_damaged(folder: Path) -> None:
    """Raise where a folder with a trained model is a damaged checkpoint; warn where it was never marked as complete."""
    if (folder / WHOLE).exists():
        if reason := damage(folder):
            raise UserError(f"{folder} is damaged: {reason}. Name another checkpoint.")
    elif step_of(folder) is not None:
        logger.warning("warning: %s has no %s: it was written without one, or cut off", folder, WHOLE)


def named_checkpoint(path: str) -> Path:
    """Return the checkpoint that the user named; raise where it is not complete."""
    folder = Path(path).expanduser()
    if step_of(folder) is None:
        raise UserError(f"resume_from_checkpoint: {folder} is no checkpoint; name one of its checkpoint-N folders")
    if reason := damage(folder):
        raise UserError(f"resume_from_checkpoint: {folder} is damaged: {reason}. Name another, or use --resume.")
    return folder


def checkpoint_to_resume(resume_from: str | bool | Path | None, run_folder: Path) -> Path | None:
    """Return the checkpoint to resume from: the named folder, or with True the last complete one of the run."""
    if not resume_from:
        return None
    if resume_from is not True:
        folder = Path(resume_from).expanduser()
        if not folder.is_dir():
            there = ", ".join(str(path) for _, path in checkpoints_of(folder.parent)) or "none"
            raise UserError(f"resume_from_checkpoint: there is no folder {folder}. Checkpoints beside it: {there}.")
        if (folder / WHOLE).exists() and (reason := damage(folder)):
            raise UserError(f"resume_from_checkpoint: {folder} is damaged: {reason}. Name another.")
        return folder
    folders = [folder for _, folder in checkpoints_of(run_folder)]
    if any((folder / WHOLE).exists() for folder in folders):
        checkpoint = last_whole_checkpoint(run_folder)
    else:  # checkpoints without marks: this file is written last
        checkpoint = next((folder for folder in folders if (folder / "trainer_state.json").is_file()), None)
        if checkpoint is not None:
            logger.warning("warning: %s has no %s: it was written without one, or cut off", checkpoint, WHOLE)
    if checkpoint is None:
        aside = [folder for old in run_folder.glob("superseded-*") for _, folder in checkpoints_of(old)]
        name = f", or name one of an earlier run: {', '.join(map(str, sorted(aside)))}" if aside else ""
        raise UserError(
            f"resume_from_checkpoint: {run_folder} has no whole checkpoint. Leave it out to begin anew{name}."
        )
    return checkpoint


def set_aside(run_folder: Path, step: int) -> None:
    """Move checkpoints after `step` to a folder `superseded-N`, so that a later resume does not use them."""
    later = [folder for number, folder in checkpoints_of(run_folder) if number > step]
    if not later:
        return
    target = next(path for n in count(1) if not (path := run_folder / f"superseded-{n}").exists())
    target.mkdir()
    for folder in later:
        folder.rename(target / folder.name)
    verb = "is" if len(later) == 1 else "are"
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) / 1e9
    what = f"{counted(len(later), 'checkpoint')} after step {step} {verb} now in {target} ({size:.2f} GB)"
    logger.warning("warning: %s, and not resumed from; delete this folder when you need the space", what)
