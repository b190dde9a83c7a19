"""A run as text for a terminal: how it stands, its curves in one line each, verdicts, and some completions."""

import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
BAR, CURVE = 30, 32  # characters
# What stands in the list, as far as a run logs it.
SHOWN = (
    "reward", "group_reward_std", "frac_reward_zero_std", "loss", "rewards/accuracies", "rewards/margins", "accuracy",
    "mean_token_accuracy", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm",
    "learning_rate", "tokens_per_second",
)  # fmt: skip
COMPLETIONS = 3  # the best, one in the middle, and the worst
LINES = 4  # of one completion


def text_page(data: Mapping[str, Any], width: int | None = None) -> str:
    """Return the page's data as lines of at most `width` characters."""
    width = width or shutil.get_terminal_size((100, 40)).columns
    lines = [line for run in data["runs"] for line in (*_run_lines(run, width), "")]
    return "\n".join(line[:width] for line in lines).rstrip() + "\n"


def is_over(data: Mapping[str, Any]) -> bool:
    """Return whether no run of the page can change any more."""
    return not any(run["state"] in ("running", "missing", "empty") for run in data["runs"])


def _run_lines(run: Mapping[str, Any], width: int) -> Iterator[str]:
    yield f"{run['name']}  {run['method']}  {_standing(run)}"
    if run["message"]:
        yield from textwrap.wrap(run["message"], width)
    for name, steps, values in _series(run):
        known = [value for value in values if value is not None]
        first, last = known[0], known[-1]
        yield f"  {name:<28}{_curve(known)}  {last:.4g}  (from {first:.4g} at step {steps[0]})"
    yield from _health_lines(run, width)
    yield from _completion_lines(run, width)


def _standing(run: Mapping[str, Any]) -> str:
    step, steps = run["step"], run["max_steps"]
    parts = [run["state"], f"step {step}" + (f" of {steps:g}" if steps else "")]
    if steps:
        done = min(int(BAR * step / steps), BAR)
        parts.insert(1, f"[{'#' * done}{'-' * (BAR - done)}]")
    if run["state"] == "running" and run["started"] and steps and step:
        left = (time.time() - run["started"]) / step * (steps - step)
        parts.append(f"about {left / 60:.0f} min left" if left >= 120 else f"about {left:.0f} s left")
    return "  ".join(parts)


def _series(run: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int], Sequence[float | None]]]:
    """Yield name, steps and values of the metrics in the list, then of evaluations."""
    for name in SHOWN:
        if name in run["metrics"]:
            yield name, run["steps"], run["metrics"][name]
    for name in ("eval_reward", "eval_loss"):
        if name in run["evaluated"]:
            yield name, run["eval_steps"], run["evaluated"][name]


def _curve(values: Sequence[float]) -> str:
    """Return values as a row of blocks, means where there are more than fit."""
    size = max(len(values) / CURVE, 1)
    parts = [
        values[int(n * size) : max(int((n + 1) * size), int(n * size) + 1)] for n in range(min(len(values), CURVE))
    ]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means).ljust(CURVE)


def _health_lines(run: Mapping[str, Any], width: int) -> Iterator[str]:
    for verdict in run["health"]:
        text = f"{verdict['level']}: {verdict['name']} at step {verdict['step']}: {verdict['meaning']}."
        yield from textwrap.wrap(
            f"{text} Remedy: {verdict['remedy']}.", width, initial_indent="  ", subsequent_indent="    "
        )
    waiting = [one for one in run["too_early"] if one["level"] == "alarm"]
    if waiting and run["steps"]:
        rules = ", ".join(f"{one['name']} ({one['step']})" for one in waiting)
        text = f"too early for rules that judge from the step named on: {rules}"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def _completion_lines(run: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the best, a middle and the worst completion of the newest rollout, or of the newest evaluation."""
    parts = [part for part in run["completions"] if part["set"] == ""] or run["completions"]
    rows = parts[-1]["rows"] if parts else []
    if not rows:
        return
    ranked = sorted(rows, key=lambda row: -row.get("reward", 0.0))
    chosen = ranked if len(ranked) <= COMPLETIONS else [ranked[0], ranked[len(ranked) // 2], ranked[-1]]
    yield f"  completions of step {parts[-1]['step']} ({parts[-1]['total']}):"
    for row in chosen:
        reward = f"reward {row['reward']:.3g}" if "reward" in row else ""
        yield f"    {_content(row.get('prompt'))!s:.60}  {reward}".rstrip()
        text = _content(row.get("messages") or row.get("completion")) or "(nothing)"
        wrapped = textwrap.wrap(text, width - 6) or [""]
        yield from (f"      {line}" for line in wrapped[:LINES])
        if len(wrapped) > LINES:
            yield "      ..."


def _content(messages: Sequence[Mapping[str, str]] | None) -> str:
    """Return the last message of a conversation in one line, without what a terminal would obey."""
    text = messages[-1]["content"] if messages else ""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
