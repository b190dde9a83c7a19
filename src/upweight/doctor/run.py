"""Checks a run folder: how the run ended, and what the health rules report about its metrics."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from upweight.config.sections.training import LESS_MEMORY
from upweight.doctor.findings import Finding, Level
from upweight.errors import UserError
from upweight.log import counted
from upweight.runs.checkpoints import WHOLE, checkpoints_of, damage
from upweight.runs.command import moved, recorded_advice
from upweight.runs.files import (
    CONFIG,
    HEALTH,
    METRICS,
    RECORD,
    JsonLines,
    metrics_of,
    no_run_in,
    read_json,
    this_machine,
)
from upweight.runs.health import Waiting, too_early, verdicts
from upweight.runs.remedies import as_typed
from upweight.runs.report.run import folders_of, run_status
from upweight.runs.settings import settings_warnings

MEMORY_ERRORS = ("out of GPU memory", "OutOfMemoryError", "out of memory", "MemoryError")
MEMORY_REMEDIES = f"in this order: halve 'token_budget'; {LESS_MEMORY}"
KILLED_ERRORS = (
    "it recorded no reason, as when Ctrl-C is pressed twice, or when host memory is full (exit code -9 or 137): look "
    "into the system's log; fewer dataloader_num_workers and no dataset_keep_in_memory need less; then "
)
FULL = 64 << 20  # bytes free, of a disk on which no checkpoint has room


def check_run(folder: Path) -> list[Finding]:
    """Return the findings about a run, or about each stage of a run."""
    stages = folders_of(folder)
    if stages != [folder]:
        return [replace(item, what=f"{stage.name}: {item.what}") for stage in stages for item in check_run(stage)]
    is_stage = re.fullmatch(r"stage-\d+-.+", folder.name) is not None  # has its config before it begins
    if not any((folder / name).is_file() for name in (METRICS, RECORD, *((CONFIG,) if is_stage else ()))):
        raise UserError(no_run_in(folder))
    rows, record = metrics_of(folder), moved(read_json(folder / RECORD), folder)
    state = run_status(record, there=True, logged=True)["state"]
    checkpoints = [
        (step, path, damage(path))
        for step, path in checkpoints_of(folder)
        if state != "running" or (path / WHOLE).exists()  # else it is being written
    ]
    whole = next((step for step, _, reason in checkpoints if reason is None), None)
    remedy = "`rm -r {}` removes it; a resume passes over it"
    damaged = [
        Finding(
            "warning",
            "checkpoint",
            f"{path.name} is damaged: {reason}",
            remedy.format(shlex.quote(str(path))),
            {"step": step},
        )
        for step, path, reason in checkpoints
        if reason is not None
    ]
    ended = _run_state(rows, record, state, whole)
    if state == "killed" and (free := shutil.disk_usage(folder).free) < FULL:
        full = (
            f"its disk is full ({free >> 20} MiB free): make room; {recorded_advice(record, whole, trained=bool(rows))}"
        )
        ended = replace(
            ended, says=f"ended {ended.says.partition('outside ')[2]} and could not record why", remedy=full
        )
    failed, remedies = ended.level == "alarm", _remedies_of_script(folder) if "settings" in record else {}
    warnings = [Finding("warning", "keys", warning) for warning in settings_warnings(folder, record)]
    health = list(_check_health(rows, remedies, failed=failed))
    complete = [(step, path) for step, path, reason in checkpoints if reason is None]
    health = [replace(one, remedy=as_typed(one.remedy, one.evidence, folder, record, complete)) for one in health]
    return [ended, *damaged, *warnings, *health]


def _run_state(rows: list[dict[str, Any]], record: dict[str, Any], state: str, whole: int | None) -> Finding:
    """Report whether the run is running or how it ended; `whole` is the step of its last whole checkpoint."""
    last, planned = max((row["step"] for row in rows), default=0), record.get("max_steps")
    where = f"at step {last}" + (f" of {planned}" if planned else "")
    evidence = {"step": last, "max_steps": planned, **({"message": record["message"]} if "message" in record else {})}
    message = str(record.get("message", ""))
    if state == "failed" and any(word in message for word in MEMORY_ERRORS):
        return Finding("alarm", "out of memory", f"the run failed {where}: {message}", MEMORY_REMEDIES, evidence)
    if state == "running" and record.get("machine") != this_machine():
        return Finding("note", "run", f"was running on another machine, {where}, when it last wrote", evidence=evidence)
    advice = recorded_advice(record, whole, trained=bool(rows))
    endings: dict[str, tuple[Level, str, str]] = {
        "done": ("ok", f"finished {where}", ""),
        "stopped": ("warning", f"was stopped {where}", advice),
        "failed": ("alarm", f"failed {where}: {message}", f"correct the cause; {advice}"),
        "running": ("ok", f"is running, {where}", ""),
        "killed": ("alarm", f"was ended from outside {where}", KILLED_ERRORS + advice),
    }
    level, says, remedy = endings.get(state, ("note", f"does not say how it ended; its metrics are {where}", ""))
    return Finding(level, "run", says, remedy, evidence)


def _remedies_of_script(folder: Path) -> dict[str, str]:
    """Return the remedies by verdict as the run wrote them, with the arguments of its script in place of keys."""
    return {str(row.get("name")): str(row["remedy"]) for row in JsonLines(folder / HEALTH).read() if "remedy" in row}


def _check_health(rows: list[dict[str, Any]], remedies: Mapping[str, str], *, failed: bool) -> Iterator[Finding]:
    """Apply the health rules to the logged metrics; `failed`: how the run ended is an alarm already."""
    if not rows:
        yield Finding(
            "note" if failed else "warning", "metrics", f"{METRICS} has no rows: the run ended before its first log"
        )
        return
    warnings = verdicts(rows)
    for verdict in warnings:
        evidence = {key: value for key, value in asdict(verdict).items() if key not in ("name", "level", "remedy")}
        says = f"{verdict.seen()}, at step {verdict.step}"
        level: Level = "alarm" if verdict.level == "alarm" else "warning"
        yield Finding(level, verdict.name, says, remedies.get(verdict.name, verdict.remedy), evidence)
    waiting = too_early(rows)
    evidence = {"waiting": [one._asdict() for one in waiting]}
    if any(one.level == "alarm" for one in waiting):
        steps = max(row["step"] for row in rows)
        yield Finding(
            "note", "too early", f"after {counted(steps, 'step')}, {_judge_later(waiting)}", evidence=evidence
        )
    elif not warnings:
        says = f"no health rule reports a problem in {counted(len(rows), 'logged row')}"
        later = f"; {_judge_later(waiting)}" if waiting else ""
        yield Finding("ok", "health", says + later, evidence=evidence if waiting else {})


def _judge_later(waiting: list[Waiting]) -> str:
    """Say when the rules that are left judge; the JSON has all their names."""
    first, last = waiting[0], waiting[-1]
    if len(waiting) == 1:
        return f"the rule '{first.name}' judges from step {first.step} on"
    return f"{len(waiting)} rules judge later: '{first.name}' from step {first.step} on, all from step {last.step} on"
