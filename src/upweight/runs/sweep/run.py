"""Trains the trials of a sweep one after the other, in processes of their own; what is done is not done again."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from upweight.files import write_text
from upweight.log import logger
from upweight.processes import forwarded_signals
from upweight.runs.checkpoints import last_whole_checkpoint
from upweight.runs.files import RECORD, read_json
from upweight.runs.sweep.plan import Trial

LOG = "trial.log"
# A trial must not go on when its sweep was killed: a second one would find its folder in use.
START = "from upweight.processes import end_with_parent; end_with_parent(); from upweight.cli.app import main; main()"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_done(folder: Path) -> bool:
    """Return whether a trial has been trained to its end."""
    return read_json(folder / RECORD).get("state") == "done"


def run_trials(
    path: Path, shared: Sequence[str], trials: Sequence[Trial], folder: Path, after: Callable[[], None]
) -> bool:
    """Train what is not done yet, and call `after` after each trial; return False where a signal ended the sweep."""
    for number, trial in enumerate(trials, 1):
        place = folder / trial.name
        if is_done(place):
            logger.info("trial %d of %d: %s is done", number, len(trials), trial.name)
            continue
        resume = last_whole_checkpoint(place) is not None
        logger.info("trial %d of %d: %s%s", number, len(trials), trial.name, ", resumed" if resume else "")
        if place.exists() and not resume:
            shutil.rmtree(place)  # of a trial that was killed before its first checkpoint
        place.mkdir(parents=True, exist_ok=True)
        overrides = [*shared, *trial.overrides(), f"output_dir={place}"]
        began = time.monotonic()
        code, stopped = _run_one([str(path), *overrides, *(["--resume"] if resume else [])], place / LOG)
        if code and not stopped and (record := read_json(place / RECORD)).get("state") != "failed":
            # It ended before it could write its record, or was killed.
            write_text(place / RECORD, json.dumps({**record, "state": "failed", "message": _last_line(place / LOG)}))
        after()
        if stopped:
            return False
        if code:
            reason = _last_line(place / LOG)
            logger.warning("warning: trial %s failed (exit %d): %s", trial.name, code, reason)
        else:
            logger.info("trial %s took %.0f s", trial.name, time.monotonic() - began)
    return True


def _run_one(arguments: Sequence[str], log: Path) -> tuple[int, bool]:
    """Run `upweight train` with its output in a file; return its exit code, and whether a signal was forwarded."""
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-c", START, "train", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        with forwarded_signals(SIGNALS, [process]) as signals:
            return process.wait(), bool(signals)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:300]} (all of it: {log})" if lines else str(log)
