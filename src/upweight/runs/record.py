"""The state of a run in `run.json`: start time, process, planned steps, and how it ended."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from upweight.errors import UserError
from upweight.files import storage_error, write_text
from upweight.log import counted, logger
from upweight.processes import start_ticks
from upweight.runs.checkpoints import checkpoints_of, is_whole, newest_marked
from upweight.runs.command import recorded_command, resume_from, resume_words
from upweight.runs.files import CONFIG, RECORD, metrics_of, read_json, this_machine
from upweight.runs.report.page import write_report
from upweight.runs.report.run import run_status

TRAINED = ("adapter_config.json", "config.json")
GPU_LOST = ("GPU is lost", "fallen off the bus", "uncorrectable ECC error", "no CUDA-capable device", "device lost")


def about(trainer: Any) -> dict[str, Any]:
    """Return the planned steps, rows and ranks of a training for its record."""
    steps, held_out = trainer.args.max_steps, trainer.eval_rows
    if steps <= 0:
        steps = math.ceil(trainer.args.num_train_epochs * len(trainer.get_train_dataloader()))
    return {
        "max_steps": steps,
        "rows": _length(trainer.train_rows),
        "held_out_rows": sum(map(len, held_out.values() if isinstance(held_out, Mapping) else [held_out or ()])),
        "ranks": trainer.args.world_size,
    }


def _length(rows: Any) -> int | None:
    try:
        return len(rows)
    except TypeError:  # a stream
        return None


class EarlierRun(NamedTuple):
    """What a run left in a folder, and what can be done about it, for a message."""

    holds: str
    ways: str


def earlier_run(folder: Path) -> EarlierRun | None:
    """Return what a run left in a folder; None where none has trained there."""
    steps = max((row["step"] for row in metrics_of(folder)), default=None)
    trained = (folder / CONFIG).is_file() and any((folder / name).is_file() for name in TRAINED)
    if steps is None and not trained:
        return None
    record = read_json(folder / RECORD)
    state = run_status(record, there=True, logged=True)["state"]
    is_here = record.get("machine") == this_machine()
    running = f"process {record.get('pid')} is training" if is_here else "runs on another machine, or was killed there"
    words = {"done": "finished", "failed": "failed", "stopped": "was stopped", "running": running}
    words["killed"] = f"was killed (its process {record.get('pid')} is gone)"
    what = "a trained model" if steps is None else f"a run of {counted(steps, 'step')}"
    holds = what + (f", which {words[state]}" if state in words else "")
    if state == "running" and is_here:
        return EarlierRun(holds, "Wait for it, or end it")
    step, again = newest_marked(folder), "`--overwrite` trains from the beginning and replaces its model and metrics"
    if step is None and state in ("failed", "stopped", "killed"):
        return EarlierRun(holds, f"It left no checkpoint: {again}")
    return EarlierRun(holds, f"`--resume` continues it{f' from step {step}' if step else ''}, {again}")


def require_trained(folder: Path) -> None:
    """Raise where the folder of a run or checkpoint holds no model that can be loaded, with what to do or to name."""
    if any((folder / name).is_file() for name in TRAINED):
        return
    whole = (path for _, path in checkpoints_of(folder) if any((path / name).is_file() for name in TRAINED))
    newest = next(whole, None)
    instead = "" if newest is None else f" Until then, name its newest checkpoint: {newest}."
    remedy = f"`upweight train CONFIG --resume` finishes it, and a script ends with trainer.save_model().{instead}"
    raise UserError(f"{folder}: holds no model: it holds shards, or the run has not ended. {remedy}")


@contextlib.contextmanager
def recorded(folder: Path, about: Mapping[str, Any], *, writes: bool) -> Iterator[None]:
    """Keep the record of a run, with `about` in it, while it trains; write its report when it has ended in any way."""
    if not writes:  # another rank does
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    process = {"pid": os.getpid(), "begun": start_ticks(os.getpid()), "machine": this_machine()}
    record = {"state": "running", "started": time.time(), **process, "command": recorded_command(), **about}
    record["folder"] = str(folder.resolve())
    write_text(folder / RECORD, json.dumps(record))
    end: dict[str, Any] = {"state": "done"}
    reason = None
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        end = {"state": "stopped"}
        raise
    except BaseException as error:  # an exception that is not caught here would be recorded as done
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if reason := _what_was_lost(error, folder):
            message = f"{reason} {_resume_sentence(folder)}"
        end = {"state": "failed", "message": message}
        if reason:
            raise UserError(message) from error
        raise
    finally:
        try:
            write_text(folder / RECORD, json.dumps({**record, "ended": time.time(), **end}))
        except OSError as error:
            logger.warning("warning: %s could not be written: %s", folder / RECORD, error.strerror)
        report_on(folder, quiet=reason is not None)


def _what_was_lost(error: BaseException, folder: Path) -> str | None:
    """Return a sentence where the disk, the run folder, the GPU or a loader process was lost, else None."""
    if reason := storage_error(error):
        free = f", {shutil.disk_usage(folder).free / 2**20:,.0f} MiB free" if folder.is_dir() else ""
        return f"output_dir: {folder} cannot be written to: {reason}{free}."
    if isinstance(error, OSError) and not folder.is_dir():
        return f"output_dir: {folder} is gone."
    if any(sign in str(error) for sign in GPU_LOST):
        return f"the GPU was lost: {str(error).splitlines()[0]}."
    if "DataLoader worker (pid" in str(error):
        return f"dataloader_num_workers: a process that reads rows was lost: {str(error).splitlines()[0].rstrip(' .')}."
    return None


def _resume_sentence(folder: Path) -> str:
    """Return a sentence about what a resume can begin with."""
    whole = next((step for step, path in checkpoints_of(folder) if is_whole(path)), None)
    return f"Once the cause is fixed, {resume_from(whole, resume_words())}."


def report_on(folder: Path, *, quiet: bool = False) -> None:
    """Write the report of a run; an error in it is only logged, unless the error that ended the run says why."""
    if not folder.is_dir():
        return
    try:
        logger.info("report: %s", write_report([folder]))
    except Exception as error:  # it reads any files in the folder, and its error would hide the one that ended the run
        reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        if not quiet:
            logger.warning("warning: the report could not be written: %s", reason)
