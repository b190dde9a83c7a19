"""Reads the completions of a run for its page: the newest and evenly spaced earlier steps, up to a size limit."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upweight.log import counted
from upweight.runs.files import COMPLETIONS, JsonLines
from upweight.runs.report.pictures import Pictures, picture_names
from upweight.runs.report.reading import evenly, number, plain

ROLLOUTS, NEWEST, EVALUATIONS = 40, 10, 10  # files shown, of which the newest in a row; of each evaluation's set
ROWS = 64  # completions of a file
MEASURED = 512  # completions of a file whose rewards and lengths are drawn
MAX_CHARS = 8000  # letters of one text
MOST_CHARACTERS = 4_000_000  # letters of all of them as JSON

FIELDS = {"step", "rollout", "version", "row", "prompt", "completion", "messages", "tokens", "finished", "rewards",
       "advantage", "token_texts", "sampler_logps", "policy_logps", "token_advantages", "sampled",
       "failure"}  # fmt: skip
OBSERVED = "observed_images"  # that tools and environments returned
Message = dict[str, str]


class CompletionsReader:
    """Reads the completions of a run; files that have not changed are not read again."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / COMPLETIONS
        self.known: dict[Path, tuple[tuple[int, int], dict[str, Any], int]] = {}
        self._named: dict[str, str] = {}  # files of images by their digests
        self._pictures = Pictures()

    def read(self, weights: Sequence[float]) -> tuple[list[dict[str, Any]], list[str]]:
        """Return one object for each file shown, by set and step, and notes on what is left out."""
        files: dict[str, dict[int, Path]] = {}  # by set name (empty for training) and step
        for file in self.folder.glob("*step_*.jsonl"):
            if match := re.fullmatch(r"(?:(.+)_)?step_(\d+)\.jsonl", file.name):
                files.setdefault(match[1] or "", {})[int(match[2])] = file
        room, parts = MOST_CHARACTERS, []
        for name, step in by_importance({name: sorted(steps) for name, steps in files.items()}):
            part, size = self._shown_file(files[name][step], name, step, weights)
            if size <= room:
                room -= size
                parts.append(part)
        parts.sort(key=lambda part: (part["set"], part["step"]))
        count, rows = sum(map(len, files.values())), sum(part["total"] - len(part["rows"]) for part in parts)
        shortened = count > len(parts)
        notes = [f"Of {count:,} rollouts and evaluations, {len(parts):,} are on this page."] if shortened else []
        verb = "is" if rows == 1 else "are"
        notes += [f"{counted(rows, 'completion')} of the steps shown {verb} not on it."] if rows else []
        return parts, [" ".join([*notes, f"All of them are in {COMPLETIONS}/."])] if notes else []

    def _shown_file(self, file: Path, name: str, step: int, weights: Sequence[float]) -> tuple[dict[str, Any], int]:
        """Return what the page shows of a file, and its size there."""
        try:
            stat = file.stat()
        except OSError:  # a run that starts again removes its files
            return {"set": name, "step": step, "total": 0, "rows": [], "rewards": [], "lengths": []}, 0
        state = (stat.st_mtime_ns, stat.st_size)
        if file not in self.known or self.known[file][0] != state:
            rows = JsonLines(file).read()
            part = {"set": name, "step": step, "total": len(rows), "rows": [shown(row, weights) for row in rows[:ROWS]]}
            part |= _measured(rows[:MEASURED], weights)
            for row in rows[:ROWS]:
                self._named |= picture_names(row) | picture_names(row, OBSERVED)
            self.known[file] = (state, part, len(json.dumps(part, ensure_ascii=False)))
        return self.known[file][1:]

    def pictures(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the images of the completions shown, those of the newest steps first."""
        rows = (row for part in reversed(parts) for row in part["rows"])
        wanted = (digest for row in rows for name in ("images", OBSERVED) for digest in row.get(name, ()))
        return self._pictures.read(self._named, wanted)


def _measured(rows: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, list[float]]:
    """Return the rewards and lengths of a file's completions, as far as they are known."""
    rewards = (weighted_reward(row, weights) for row in rows)
    lengths = (number(row.get("tokens")) for row in rows)
    return {
        "rewards": [value for value in rewards if value is not None],
        "lengths": [value for value in lengths if value is not None],
    }


def reward_ranges(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the lowest and the highest value of each reward, and of their sum, among the completions shown."""
    seen: dict[str, list[float]] = {}
    for part in parts:
        seen.setdefault("reward", []).extend(part["rewards"])
        for row in part["rows"]:
            for name, value in row.get("rewards", {}).items():
                seen.setdefault(f"rewards/{name}/mean", []).extend([] if value is None else [value])
    return {name: [min(values), max(values)] for name, values in seen.items() if values}


def by_importance(steps: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """Return set and step of the files to show, most important first: the ends, then those between."""
    wanted: list[tuple[str, int]] = [(name, step) for name, known in steps.items() for step in (known[-1], known[0])]
    trained = list(steps.get("", ()))
    wanted += [("", step) for step in reversed(trained[-NEWEST:])]
    wanted += [("", step) for step in reversed(evenly(trained[:-NEWEST], ROLLOUTS - NEWEST))]
    wanted += [(name, step) for name, known in steps.items() if name for step in evenly(known, EVALUATIONS)]
    return list(dict.fromkeys(wanted))


def shown(row: Mapping[str, Any], weights: Sequence[float]) -> dict[str, Any]:
    """Return a completion as the page shows it; `weights` are the reward weights in order, or empty."""
    rewards: dict[str, Any] = row["rewards"] if isinstance(row.get("rewards"), dict) else {}
    pictures = picture_names(row)
    observed = picture_names(row, OBSERVED)
    hidden = FIELDS | ({"images"} if pictures else set()) | ({OBSERVED} if observed else set())
    fields = {
        "row": number(row.get("row")),
        "prompt": conversation(row.get("prompt"), "user"),
        "completion": conversation(row.get("completion"), "assistant"),
        "messages": conversation(row["messages"], "user") if isinstance(row.get("messages"), list) else None,
        "tokens": number(row.get("tokens")),
        "finished": row.get("finished"),
        "rewards": {name: number(value) for name, value in rewards.items()},
        "reward": weighted_reward(row, weights),
        "advantage": number(row.get("advantage")),
        "failure": None if row.get("failure") is None else _as_text(row["failure"]),
        "images": list(pictures),
        OBSERVED: list(observed),
        "columns": {name: plain(value, MAX_CHARS) for name, value in row.items() if name not in hidden},
    }
    texts = row.get("token_texts")
    if isinstance(texts, list):
        for name in ("token_texts", "sampler_logps", "policy_logps", "token_advantages", "sampled"):
            if isinstance(row.get(name), list) and len(row[name]) == len(texts):
                fields[name] = plain(row[name], MAX_CHARS)
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}


def weighted_reward(row: Mapping[str, Any], weights: Sequence[float]) -> float | None:
    """Return the sum of a completion's rewards by their weights, or None where it has none."""
    rewards: dict[str, Any] = row["rewards"] if isinstance(row.get("rewards"), dict) else {}
    factors = weights if len(weights) == len(rewards) else [1.0] * len(rewards)
    values = zip(factors, map(number, rewards.values()), strict=True)
    known = [factor * value for factor, value in values if value is not None]
    return number(sum(known)) if known else None


def conversation(value: Any, role: str) -> list[Message]:
    """Return the messages of a text or a conversation; tool calls become text."""
    if value is None:
        return []
    if not isinstance(value, list):
        return [{"role": role, "content": _as_text(value)}]
    messages = []
    for item in value:
        message = item if isinstance(item, Mapping) else {"content": _as_text(item)}
        content, calls = _content_text(message.get("content") or ""), message.get("tool_calls") or []
        call_texts = [_tool_call_text(call) for call in calls] if isinstance(calls, list) else [_as_text(calls)]
        content = "\n".join(part for part in (content, *call_texts) if part)
        messages.append({"role": _as_text(message.get("role") or role), "content": content})
    return messages


def _content_text(content: Any) -> str:
    """Return the text of a message's content, also of parts: texts, and a word for each image."""
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, Mapping) and part.get("type") in ("text", "image") for part in parts):
        return _as_text(content)
    return _as_text(" ".join("[image]" if part["type"] == "image" else str(part.get("text") or "") for part in parts))


def _tool_call_text(call: Any) -> str:
    """Return a tool call as `name(arguments)`."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return _as_text(call)
    return _as_text(f"{inner['name']}({_as_text(inner.get('arguments', ''))})")


def _as_text(value: Any) -> str:
    return plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), MAX_CHARS)
