"""A run as text for a terminal: how it stands, its curves in one line each, verdicts, and some completions."""

import re
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from upweight.log import counted

BLOCKS = "▁▂▃▄▅▆▇█"
BAR, CURVE, SHORTEST = 30, 32, 8  # characters: what there is room for, and what says too little
# What stands in the list, as far as a run logs it.
SHOWN = (
    "reward", "group_reward_std", "frac_reward_zero_std", "loss", "rewards/accuracies", "rewards/margins", "accuracy",
    "mean_token_accuracy", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm",
    "learning_rate", "tokens_per_second",
)  # fmt: skip
COMPLETIONS = 3  # the best, one in the middle, and the worst
LINES, QUESTION_LINES = 4, 2  # of one completion, and of what was asked
# What chat templates write around turns, and the name of a turn's role at its beginning. Runs record messages where
# they can read them back from a prompt; this is for the prompts of other templates.
MARKS = r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>|<[be]os>"
ROLE = r"(system|user|human|assistant|model|tool)(?:\n|$)"


def text_page(data: Mapping[str, Any], width: int | None = None, height: int | None = None) -> str:
    """Return the page's data as lines of at most `width` characters, from the top as many as `height` holds."""
    width = width or shutil.get_terminal_size((100, 40)).columns
    lines = [line[:width] for run in data["runs"] for line in (*_run_lines(run, width), "")][:-1]
    if height is not None and len(lines) >= height:  # the cursor takes the last one
        below = len(lines) - height + 2
        lines = [
            *lines[: height - 2],
            f"... {counted(below, 'more line')}: in a taller window, or with `| less`"[:width],
        ]
    return "\n".join(lines).rstrip() + "\n"


def is_over(data: Mapping[str, Any]) -> bool:
    """Return whether no run of the page can change any more."""
    return not any(run["state"] in ("running", "missing", "empty") for run in data["runs"])


def _run_lines(run: Mapping[str, Any], width: int) -> Iterator[str]:
    yield f"{run['name']}  {run['method']}  {_standing(run, width - len(run['name']) - len(run['method']) - 4)}"
    if run["message"]:
        yield from textwrap.wrap(run["message"], width)
    if run["advice"]:
        yield from textwrap.wrap(f"{run['advice'][0].upper()}{run['advice'][1:]}.", width)
    rows = []
    for name, steps, values in _series(run):
        known = [value for value in values if value is not None]
        first, last = known[0], f"{known[-1]:.4g}"
        if name == "loss" and values[-1] is None:  # which every step logs
            last = "not a number"
        rows.append((name, known, f"{last}  (from {first:.4g} at step {steps[0]})"))
    names, texts = (max((len(row[part]) for row in rows), default=0) for part in (0, 2))
    length = max(min(CURVE, width - names - texts - 6), SHORTEST)
    for name, known, text in rows:
        yield f"  {name:<{names}}  {_curve(known, length)}  {text}"
    yield from _health_lines(run, width)
    yield from _completion_lines(run, width)


def _standing(run: Mapping[str, Any], width: int) -> str:
    step, steps = run["step"], run["max_steps"]
    parts = [run["state"], f"step {step}" + (f" of {steps:g}" if steps else "")]
    trained = step - run["resumed_step"]
    if run["state"] == "running" and run["started"] and steps and trained > 0:
        left = (time.time() - run["started"]) / trained * (steps - step)
        parts.append(f"about {left / 60:.0f} min left" if left >= 120 else f"about {left:.0f} s left")
    bar = min(BAR, width - len("  ".join(parts)) - 4)
    if steps and bar >= SHORTEST:
        done = min(int(bar * step / steps), bar)
        parts.insert(1, f"[{'#' * done}{'-' * (bar - done)}]")
    return "  ".join(parts)


def _series(run: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int], Sequence[float | None]]]:
    """Yield name, steps and values of the metrics in the list, then of evaluations."""
    for name in SHOWN:
        if name in run["metrics"]:
            yield name, run["steps"], run["metrics"][name]
    for name in ("eval_reward", "eval_loss"):
        if name in run["evaluated"]:
            yield name, run["eval_steps"], run["evaluated"][name]


def _curve(values: Sequence[float], length: int) -> str:
    """Return values as a row of blocks, means where there are more than fit."""
    size = max(len(values) / length, 1)
    parts = [
        values[int(n * size) : max(int((n + 1) * size), int(n * size) + 1)] for n in range(min(len(values), length))
    ]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means).ljust(length)


def _health_lines(run: Mapping[str, Any], width: int) -> Iterator[str]:
    for warning in run["warnings"]:
        yield from textwrap.wrap(f"warning: {warning}", width, initial_indent="  ", subsequent_indent="    ")
    for verdict in run["health"]:
        text = f"{verdict['level']}: {verdict['name']} at step {verdict['step']}: {verdict['meaning']}."
        yield from textwrap.wrap(
            f"{text} Remedy: {verdict['remedy']}.", width, initial_indent="  ", subsequent_indent="    "
        )
    waiting = [one for one in run["too_early"] if one["level"] == "alarm"]
    if waiting and run["steps"]:
        rules = ", ".join(f"{one['name']} ({one['step']})" for one in waiting)
        if more := len(run["too_early"]) - len(waiting):
            rules += f" and {more} that only warn"
        text = f"too early for rules (in brackets the step from which each can judge): {rules}"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")


def _completion_lines(run: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the best, a middle and the worst completion of the newest rollout, then held-out answers of two steps."""
    rollouts = [part for part in run["completions"] if part["set"] == "" and part["rows"]]
    held_out = [part for part in run["completions"] if part["set"] and part["rows"]]
    if rollouts:
        yield f"  completions of step {rollouts[-1]['step']} ({rollouts[-1]['total']}):"
        for rows in _by_prompt(_chosen(rollouts[-1]["rows"])):
            yield from _question_lines(rows[0], width)
            for row in rows:
                yield from _answer_lines(row, "", width)
    for name in dict.fromkeys(part["set"] for part in held_out):
        parts = [part for part in held_out if part["set"] == name]
        yield from _before_and_after(parts[0], parts[-1], width)


def _before_and_after(first: Mapping[str, Any], last: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield answers to the same prompts at the first and at the last evaluation of a set."""
    if first is last:
        yield f"  held-out answers of step {last['step']} ({last['total']}):"
    else:
        yield f"  held-out answers, before (step {first['step']}) and after (step {last['step']}):"
    earlier = {_key_of(rows[0]): rows[0] for rows in _by_prompt(first["rows"])} if first is not last else {}
    answered = [rows[0] for rows in _by_prompt(last["rows"])] if earlier else last["rows"]  # one beside one before
    for rows in _by_prompt(_chosen(answered)):
        before = earlier.get(_key_of(rows[0]))
        yield from _question_lines(rows[0], width)
        if before is not None:
            yield from _answer_lines(before, "before", width)
        for row in rows:
            yield from _answer_lines(row, "after" if before is not None else "", width)


def _key_of(row: Mapping[str, Any]) -> tuple[Any, str]:
    """Return what tells the prompts of an evaluation apart."""
    return row.get("row"), _question(row)


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return rows that answer the same prompt together, in the order of the prompts."""
    groups: dict[tuple[Any, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_key_of(row), []).append(row)
    return list(groups.values())


def _chosen(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the best, one in the middle, and the worst; without rewards the first ones."""
    if not any("reward" in row for row in rows):
        return rows[:COMPLETIONS]
    ranked = sorted(rows, key=lambda row: -row.get("reward", 0.0))
    return ranked if len(ranked) <= COMPLETIONS else [ranked[0], ranked[len(ranked) // 2], ranked[-1]]


def _label(row: Mapping[str, Any], when: str) -> str:
    reward = f"reward {row['reward']:.3g}" if row.get("reward") is not None else ""
    marks = ", ".join(filter(None, (reward, "cut off" if row.get("finished") is False else "")))
    label = f"{when} ({marks})" if when and marks else when or marks
    return f"{label}: " if label else ""


def _question_lines(row: Mapping[str, Any], width: int) -> Iterator[str]:
    text = textwrap.shorten(_question(row), QUESTION_LINES * (width - 6), placeholder=" ...")
    yield from textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _answer_lines(row: Mapping[str, Any], when: str, width: int) -> Iterator[str]:
    messages = row.get("messages") or row.get("completion")
    text = _label(row, when) + (_printable(messages[-1]["content"] if messages else "") or "(nothing)")
    wrapped = textwrap.wrap(text, width - 6) or [""]
    yield from (f"      {line}" for line in wrapped[:LINES])
    if len(wrapped) > LINES:
        yield "      ..."


def _question(row: Mapping[str, Any]) -> str:
    """Return the user's last turn of a prompt, in one line; also of a prompt that a chat template has written."""
    messages = row.get("prompt") or []
    asked = [message for message in messages if message["role"] == "user"] or messages
    text = asked[-1]["content"] if asked else ""
    turns = [part.strip() for part in re.split(MARKS, text) if part.strip()]
    if re.search(MARKS, text):
        roles, texts, role = [], [], ""
        for turn in turns:
            named = re.match(ROLE, turn, re.IGNORECASE)
            role = named[1].lower() if named else role
            if content := turn[named.end() :].strip() if named else turn:
                roles.append(role)
                texts.append(content)
        by_user = [content for role, content in zip(roles, texts, strict=True) if role in ("user", "human")]
        text = (by_user or texts or [text])[-1]
    return _printable(text)


def _printable(text: str) -> str:
    """Return a text in one line, without what a terminal would obey."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
