"""Train the stages of a config one after the other, and write one report on all of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upweight.config import Config
from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import logger
from upweight.models.adapters.merge import AdapterFolder, merge_adapter
from upweight.runs.checkpoints import merge_is_stale
from upweight.runs.files import METRICS, metrics_of
from upweight.runs.record import report_on

DONE, REPORT = "stage.json", "stages.md"
HEADINGS = ("stage", "method", "steps", "metric", "first", "last")


def train_stages(config: Config, run_stage: Callable[[int, bool], None], *, resume: bool = False) -> None:
    """Train every stage with `run_stage(number, resume)`; a resumed run skips finished stages."""
    folders = [Path(stage.run.output_dir) for stage in config.stages]
    done = [resume and (folder / DONE).is_file() for folder in folders]
    finished = [*done, False].index(False)  # stages, from the first on
    for folder in folders[finished:]:
        (folder / DONE).unlink(missing_ok=True)
    try:
        for number, stage in enumerate(config.stages):
            if number < finished:
                logger.info("%s is done", folders[number].name)
                continue
            logger.info("%s (%d of %d)", folders[number].name, number + 1, len(folders))
            merged = folders[number - 1] / "merged"  # the adapter of the stage before, in full weights
            if number and stage.model.base_model == str(merged) and (not merged.exists() or merge_is_stale(merged)):
                merge_adapter(AdapterFolder(config.stages[number - 1].model, merged.parent), merged)
            run_stage(number, resume and number == finished)
            write_text(folders[number] / DONE, json.dumps(_stage_summary(stage)))
    finally:
        report_on(Path(config.run.output_dir))
    table = _stage_table(folders)
    text = ["# Stages", "", *table, "", f"The result is in `{folders[-1].name}`.", ""]
    write_text(Path(config.run.output_dir) / REPORT, "\n".join(text))
    for line in table:
        logger.info("%s", line)


def _stage_summary(stage: Config) -> dict[str, Any]:
    """Return the summary of a finished stage: its steps, and the first and last reward or loss."""
    folder = Path(stage.run.output_dir)
    if not (folder / METRICS).is_file():
        raise UserError(f"{folder}: the stage left no {METRICS}")
    rows = metrics_of(folder)
    metric = "reward" if any("reward" in row for row in rows) else "loss"
    values = [row[metric] for row in rows if metric in row] or [None]
    steps = max((row["step"] for row in rows), default=0)
    return dict(zip(HEADINGS, (folder.name, stage.method.name, steps, metric, values[0], values[-1]), strict=True))


def _stage_table(folders: list[Path]) -> list[str]:
    """Return a Markdown table with one line per stage."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for folder in folders:
        values = json.loads((folder / DONE).read_text(encoding="utf-8"))
        cells = [values[name] for name in HEADINGS]
        lines.append(f"| {' | '.join(f'{cell:.4g}' if isinstance(cell, float) else str(cell) for cell in cells)} |")
    return lines
