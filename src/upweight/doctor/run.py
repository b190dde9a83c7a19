"""A run folder looked at afterwards: how the run ended, and the verdicts on what it logged."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from upweight.doctor.findings import Finding
from upweight.errors import UserError
from upweight.models.memory import LESS_MEMORY
from upweight.runs.files import CONFIG, METRICS, RECORD, metrics_of, this_machine
from upweight.runs.health import verdicts
from upweight.runs.report.reading import read_json
from upweight.runs.report.run import run_status
from upweight.train.recording.checkpoints import checkpoints_of, is_whole

MEMORY = ("out of GPU memory", "OutOfMemoryError", "out of memory", "MemoryError")
LADDER = f"in this order: halve 'token_budget'; {LESS_MEMORY}"
KILLED = (
    "nothing of it was written down, as when the system ends a process for want of host memory (exit code -9, or 137): "
    "look into the system's log; dataset_keep_in_memory: false and fewer dataloader_num_workers need less; then go on "
    "with `upweight train CONFIG --resume`"
)


def check_run(folder: Path) -> list[Finding]:
    """What is to be said of a run, or of each stage of one."""
    stages = sorted(path for path in folder.glob("stage-*") if (path / CONFIG).is_file())
    if stages:
        return [replace(one, what=f"{stage.name}: {one.what}") for stage in stages for one in check_run(stage)]
    if not any((folder / name).is_file() for name in (CONFIG, METRICS, RECORD)):
        raise UserError(
            f"{folder}: neither a config nor the folder of a run. A run leaves {CONFIG} and {METRICS} there."
        )
    rows = metrics_of(folder)
    return [_state(folder, rows), *_judged(rows)]


def _state(folder: Path, rows: list[dict[str, Any]]) -> Finding:
    """How the run stands or ended."""
    record = read_json(folder / RECORD)
    last, planned = max((row["step"] for row in rows), default=0), record.get("max_steps")
    where = f"at step {last}" + (f" of {planned}" if planned else "")
    evidence = {"step": last, "max_steps": planned, **{key: record[key] for key in ("message",) if key in record}}
    state = run_status(record, there=True, logged=True)["state"]
    if state == "done":
        return Finding("ok", "run", f"finished {where}", evidence=evidence)
    if state == "stopped":
        return Finding("warning", "run", f"was stopped {where}", _go_on(folder), evidence)
    if state == "failed":
        said = str(record.get("message", ""))
        if any(word in said for word in MEMORY):
            return Finding("alarm", "out of memory", f"the run failed {where}: {said}", LADDER, evidence)
        return Finding("alarm", "run", f"failed {where}: {said}", f"mend what it names; {_go_on(folder)}", evidence)
    if state == "running" and record.get("machine") != this_machine():
        return Finding("note", "run", f"was running on another machine, {where}, when it last wrote", evidence=evidence)
    if state == "running":
        return Finding("ok", "run", f"is running, {where}", evidence=evidence)
    if state == "killed":
        return Finding("alarm", "run", f"was ended from outside {where}", KILLED, evidence)
    return Finding("note", "run", f"does not say how it ended; its metrics are {where}", evidence=evidence)


def _judged(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """The verdicts on what was logged, made anew."""
    if not rows:
        yield Finding("warning", "metrics", f"{METRICS} has no rows", "the run ended before its first log: see above")
        return
    found = verdicts(rows)
    for verdict in found:
        evidence = {key: value for key, value in asdict(verdict).items() if key not in ("name", "level", "remedy")}
        says = f"{verdict.seen()}, at step {verdict.step}"
        yield Finding("alarm" if verdict.level == "alarm" else "warning", verdict.name, says, verdict.remedy, evidence)
    if not found:
        yield Finding("ok", "health", f"no rule has anything against {len(rows)} logged rows")


def _go_on(folder: Path) -> str:
    whole = next((step for step, path in checkpoints_of(folder) if is_whole(path)), None)
    if whole is None:
        return "there is no whole checkpoint to go on from: start anew; save_steps sets how often they are written"
    return f"go on from step {whole} with `upweight train CONFIG --resume`"
