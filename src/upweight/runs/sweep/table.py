"""How the trials of a sweep did: one table, in the terminal, as JSON and as a page."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from upweight.files import write_text
from upweight.runs.files import RECORD, metrics_of, read_json
from upweight.runs.report.page import write_report
from upweight.runs.report.run import run_status
from upweight.runs.sweep.plan import Trial

TABLE, PAGE, CURVES = "sweep.json", "sweep.html", "report.html"
DEFAULT_METRICS = ("eval_reward", "eval_loss", "reward", "loss")  # the first that trials log
LAST_LOGS = 10  # over which a metric of training is averaged; evaluations count by their last value
STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem; border-bottom: 1px solid #8884; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } tr.best { font-weight: 600; background: #28f2; }
"""


@dataclass(frozen=True)
class Result:
    """A trial in the table."""

    name: str
    values: dict[str, str]
    state: str  # waits, running, done, stopped, failed, killed
    steps: int
    seconds: float | None
    value: float | None  # of the metric
    message: str = ""


def results_of(folder: Path, trials: Sequence[Trial], metric: str | None) -> tuple[str, list[Result]]:
    """Return the metric that compares trials, and each trial's result, read from the run folders alone."""
    logged = {trial: metrics_of(folder / trial.name) for trial in trials}
    names = {key for rows in logged.values() for row in rows for key in row}
    chosen = metric or next((name for name in DEFAULT_METRICS if name in names), DEFAULT_METRICS[-1])
    return chosen, [_result(folder / trial.name, trial, rows, chosen) for trial, rows in logged.items()]


def _result(folder: Path, trial: Trial, rows: list[dict[str, Any]], metric: str) -> Result:
    record = read_json(folder / RECORD)
    values = [row[metric] for row in rows if isinstance(row.get(metric), int | float) and math.isfinite(row[metric])]
    last = values[-1:] if metric.startswith("eval_") else values[-LAST_LOGS:]
    ended = record.get("ended")
    return Result(
        trial.name,
        dict(trial.values),
        run_status(record, there=True, logged=True)["state"] if "state" in record else "waits",
        max((row["step"] for row in rows), default=0),
        round(ended - record["started"], 1) if ended and record.get("started") else None,
        sum(last) / len(last) if last else None,
        str(record.get("message", "")),
    )


def best_of(metric: str, results: Sequence[Result]) -> Result | None:
    """Return the finished trial with the best value: the least of a loss, the greatest of anything else."""
    done = [result for result in results if result.state == "done" and result.value is not None]
    sign = 1 if metric.endswith("loss") else -1
    return min(done, key=lambda result: sign * (result.value or 0.0), default=None)


def write_table(folder: Path, metric: str, results: Sequence[Result], about: Mapping[str, Any]) -> None:
    """Write the table as JSON, as a page, and the curves of the trials that have begun."""
    best = best_of(metric, results)
    content = {**about, "metric": metric, "best": best and best.name, "trials": [asdict(result) for result in results]}
    write_text(folder / TABLE, json.dumps(content, indent=1))
    write_text(folder / PAGE, _page(folder.name, metric, results, best))
    begun = [folder / result.name for result in results if result.steps]
    if begun:
        write_report(begun, folder / CURVES)


def rows_of(metric: str, results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of the table; the best trial is marked."""
    best = best_of(metric, results)
    keys = list(results[0].values) if results else []
    titles = [*keys, metric, "steps", "seconds", "state"]
    cells = []
    for result in results:
        value = "" if result.value is None else f"{result.value:.5g}{' *' if result is best else ''}"
        seconds = "" if result.seconds is None else f"{result.seconds:.0f}"
        cells.append([*(result.values[key] for key in keys), value, str(result.steps), seconds, result.state])
    return titles, cells


def _page(name: str, metric: str, results: Sequence[Result], best: Result | None) -> str:
    titles, cells = rows_of(metric, results)
    head = "".join(f"<th>{html.escape(title)}</th>" for title in (*titles, "run"))
    lines = []
    for result, row in zip(results, cells, strict=True):
        texts = "".join(f'<td class="number">{html.escape(cell)}</td>' for cell in row)
        link = f'<a href="{html.escape(result.name)}/report.html">page</a>' if result.steps else ""
        note = html.escape(result.message.splitlines()[0][:200]) if result.message else ""
        lines.append(f"<tr{' class=best' if result is best else ''}>{texts}<td>{link} {note}</td></tr>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style>'
        f"<h1>{html.escape(name)}</h1><table><tr>{head}</tr>{''.join(lines)}</table>"
        f"<p>* the best; a metric of training is the mean of the last {LAST_LOGS} logs, that of an evaluation the last "
        f'value. <a href="{CURVES}">All curves</a></p></html>\n'
    )
