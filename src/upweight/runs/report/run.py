"""Reads everything that the page shows of one run folder."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from upweight.log import counted
from upweight.processes import is_alive
from upweight.runs.checkpoints import marked_checkpoints, newest_marked
from upweight.runs.command import moved, recorded_advice
from upweight.runs.files import CONFIG, HEALTH, METRICS, RECORD, JsonLines, read_json, this_machine
from upweight.runs.health import outdated, too_early
from upweight.runs.remedies import as_typed
from upweight.runs.report.charts import COMPARED, split_set
from upweight.runs.report.completions import CompletionsReader, reward_ranges
from upweight.runs.report.reading import POINTS, columns, number, plain
from upweight.runs.settings import settings_warnings

SECRET = r"(.*_)?(api_?key|secret|password|(hub|hf|auth|access|bearer)_token)"
ONLINE = ("grpo", "gdpo", "rloo", "ebft")
# What the page calls a method; others are written in capitals.
METHOD_NAMES = {"simpo": "SimPO", "reward_model": "Reward model", "process_reward_model": "Process reward model"}
SAMPLERS = {None: "in process", "server": "vLLM server", "colocate": "vLLM in the training process"}
LONGEST_VERDICT = 2000  # letters
TIMES = "\u00d7"


class RunReader:
    """Reads a run folder, repeatedly while the run trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.health = JsonLines(folder / METRICS), JsonLines(folder / HEALTH)
        self.written = CompletionsReader(folder)
        self.warnings: tuple[int | None, list[str]] = (None, [])  # by when the config was written

    def read(self, name: str) -> dict[str, Any]:
        """Return the present state of the run as plain values; `name` is its name on the page."""
        rows, record = self.metrics.read(), read_json(self.folder / RECORD)
        config = self._config_of(record)
        steps, values = columns(rows, evaluation=False)
        _count_no_failures(values)
        eval_steps, evaluated = columns(rows, evaluation=True)
        trained = (key for key in ("reward_model", "process_reward_model") if config.get(key) is True)
        chosen = str(next(trained, config.get("rl") or ("sft" if config else "")))
        method = METHOD_NAMES.get(chosen, chosen.upper())
        completions, notes = self.written.read(_numbers(_trl_block(config).get("reward_weights")))
        logged = len({row["step"] for row in rows if isinstance(row.get("step"), int)})
        status = run_status(record, there=self.folder.is_dir(), logged=bool(steps or eval_steps))
        if logged > POINTS:
            notes.append(f"Curves show {POINTS:,} of {logged:,} logged steps; all of them are in {METRICS}.")
        if self.metrics.unreadable:
            notes.append(f"{counted(self.metrics.unreadable, 'line')} of {METRICS} could not be read.")
        return {
            "name": name,
            "folder": str(self.folder),
            "method": method,
            "online": str(config.get("rl", "")) in ONLINE or "reward" in values,
            **status,
            "advice": self._advice(record, status, trained=bool(logged)),
            "step": max([*steps, *eval_steps], default=0),
            "max_steps": number(record.get("max_steps")) or number(config.get("max_steps")),
            "resumed_step": number(record.get("resumed_step")) or 0,  # since `started`, later ones were trained
            "facts": facts(config, record, method),
            "config": plain(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), 200_000) if config else "",
            "settings": _flat_keys(config),
            "health": plain(self._verdicts(record), LONGEST_VERDICT),
            "warnings": plain(self._warnings(record), LONGEST_VERDICT),
            "too_early": [one._asdict() for one in too_early(row for row in rows if isinstance(row.get("step"), int))],
            "steps": steps,
            "metrics": values,
            "eval_steps": eval_steps,
            "evaluated": evaluated,
            "held_out": first_and_last(eval_steps, evaluated, list(values)),
            "completions": completions,
            "pictures": self.written.pictures(completions),
            "ranges": reward_ranges(completions),
            "notes": notes,
        }

    def _warnings(self, record: Mapping[str, Any]) -> list[str]:
        """Return what is wrong with the settings, read again only where their file is another."""
        file = self.folder / CONFIG
        written = file.stat().st_mtime_ns if file.is_file() else None
        if self.warnings[0] != written:
            self.warnings = written, settings_warnings(self.folder, record)
        return self.warnings[1]

    def _advice(self, record: Mapping[str, Any], status: Mapping[str, Any], *, trained: bool) -> str:
        """Return how a run goes on that ended before its last step, unless the message about its end says so."""
        if status["state"] not in ("failed", "killed", "stopped"):
            return ""
        advice = recorded_advice(moved(record, self.folder), newest_marked(self.folder), trained=trained)
        return "" if advice in (status["message"] or "") else plain(advice, 2000)

    def _verdicts(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the verdicts that stand, with remedies as they are typed."""
        verdicts = self.health.read()
        left_out = outdated(str(verdict.get("name")) for verdict in verdicts)
        standing = [verdict for verdict in verdicts if verdict.get("name") not in left_out]
        whole = marked_checkpoints(self.folder) if standing else []
        return [
            one | {"remedy": as_typed(str(one.get("remedy", "")), one, self.folder, record, whole)} for one in standing
        ]

    def _config_of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the resolved config, or the settings in a script's record, without secrets."""
        try:
            config = record.get("settings") or yaml.safe_load((self.folder / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return _without_secrets(config) if isinstance(config, dict) else {}


def _count_no_failures(values: dict[str, list[float | None]]) -> None:
    """Write 0 where a reward was called and no failure is logged: a line between two failures would say otherwise."""
    for name, counts in values.items():
        if name.endswith("/failed") and (means := values.get(f"{name.removesuffix('failed')}mean")):
            values[name] = [
                0.0 if count is None and mean is not None else count for count, mean in zip(counts, means, strict=True)
            ]


def folders_of(folder: Path) -> list[Path]:
    """Return the folders of a run: its stages, or itself."""
    named = [(re.fullmatch(r"stage-(\d+)-.+", path.name), path) for path in folder.glob("stage-*")]
    numbered = [(int(match[1]), path) for match, path in named if match]
    stages = [path for _, path in sorted(numbered) if (path / METRICS).is_file() or (path / CONFIG).is_file()]
    return [folder] if (folder / METRICS).is_file() or not stages else stages


def facts(config: Mapping[str, Any], record: Mapping[str, Any], method: str) -> list[tuple[str, str]]:
    """Return the model, the data and the main settings as labelled texts."""
    trl, adapter = _trl_block(config), config.get("adapter")
    rank = f", rank {config['lora_r']}" if config.get("lora_r") else ""
    batch = (config.get("micro_batch_size"), config.get("gradient_accumulation_steps"), record.get("ranks"))
    batch_words = zip(batch, ("", " accumulated", " processes"), strict=True)
    held_out = record.get("held_out_rows")
    backend = trl.get("vllm_mode", "server") if trl.get("use_vllm") else trl.get("rollout_backend")
    texts = {
        "Method": method + (f", {trl['loss_type']} loss" if trl.get("loss_type") else ""),
        "Model": config.get("base_model"),
        "Trained": f"{adapter} adapter{rank}" if adapter else "all weights" if config else None,
        "Data": ", ".join(_dataset_name(row) for row in config.get("datasets") or () if isinstance(row, Mapping)),
        "Rows": f"{record['rows']:,}" if isinstance(record.get("rows"), int) else None,
        "Held-out rows": f"{held_out:,}" if isinstance(held_out, int) and held_out else None,
        "Batch": f" {TIMES} ".join(
            f"{part}{words}" for part, words in batch_words if isinstance(part, int) and (part > 1 or not words)
        ),
        "Learning rate": f"{config['learning_rate']:g}" if number(config.get("learning_rate")) is not None else None,
        "Completions of a prompt": trl.get("num_generations"),
        "Longest completion": f"{trl['max_completion_length']} tokens" if trl.get("max_completion_length") else None,
        "Rewards": _reward_formula(trl),
        "Sampler": SAMPLERS.get(backend, backend) if trl else None,
        "Seed": config.get("seed"),
    }
    return [(name, plain(str(value), 400)) for name, value in texts.items() if value not in (None, "")]


def first_and_last(
    steps: Sequence[int], evaluated: Mapping[str, Sequence[float | None]], known: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the first and the last evaluation of each held-out set, by metric."""
    lines_of: dict[str, list[dict[str, Any]]] = {}
    for name, values in evaluated.items():
        of, metric = split_set(name, known)
        there = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
        if re.fullmatch(COMPARED, metric) and len(there) > 1:
            (first, before), (last, after) = there[0], there[-1]
            line = {"metric": metric, "before": before, "after": after, "first": first, "last": last}
            lines_of.setdefault(of, []).append(line)
    return [{"set": of, "lines": _in_order(lines)} for of, lines in sorted(lines_of.items())]


def _in_order(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort metrics by importance; leave out a pass rate that equals its reward's mean."""
    values = {line["metric"]: (line["before"], line["after"]) for line in lines}
    means = {name: values.get(name.replace("/pass@1", "/mean")) for name in values if name.endswith("/pass@1")}
    ranks = ("reward|loss", "rewards/.+|accuracy|margin|mean_token_accuracy", ".+")

    def rank(line: Mapping[str, Any]) -> tuple[int, str]:
        return next(n for n, pattern in enumerate(ranks) if re.fullmatch(pattern, line["metric"])), line["metric"]

    return sorted((line for line in lines if means.get(line["metric"]) != values[line["metric"]]), key=rank)


def run_status(record: Mapping[str, Any], *, there: bool, logged: bool) -> dict[str, Any]:
    """Return whether a run is training, and how it ended if it has."""
    state = record.get("state")
    runs = is_alive(record.get("pid"), record.get("begun"))
    if state == "running" and record.get("machine") == this_machine() and not runs:
        state = "killed"
    if state not in ("running", "done", "stopped", "failed", "killed"):
        state = "recorded" if logged else "empty" if there else "missing"
    message = plain(record.get("message"), 20_000)
    times = {name: value for name in ("started", "ended") if number(value := record.get(name)) is not None}
    return {"state": state, "message": message, "started": None, "ended": None, **times}


def _trl_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config["trl"] if isinstance(config.get("trl"), Mapping) else {}


def _dataset_name(row: Mapping[str, Any]) -> str:
    path = Path(str(row.get("path")))
    name = path.name if path.is_absolute() else str(path)
    return name + (f" ({row['type']})" if isinstance(row.get("type"), str) else "")


def _reward_formula(trl: Mapping[str, Any]) -> str:
    names, weights = trl.get("reward_funcs"), _numbers(trl.get("reward_weights"))
    if not isinstance(names, list):
        return ""
    if len(weights) != len(names):
        return ", ".join(map(str, names))
    return ", ".join(f"{weight:g} {TIMES} {name}" for weight, name in zip(weights, names, strict=True))


def _numbers(values: Any) -> list[float]:
    return [value for value in values if number(value) is not None] if isinstance(values, list) else []


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        secret = {key for key in value if re.fullmatch(SECRET, str(key).lower())}
        return {key: "(hidden)" if key in secret else _without_secrets(inner) for key, inner in value.items()}
    return [_without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _flat_keys(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return every key by its full path, as an override names it, for comparing two runs."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        is_list = isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value)
        inner = dict(enumerate(value)) if is_list else value
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        flat |= _flat_keys(inner, f"{path}.") if isinstance(inner, Mapping) else {path: plain(written, 300)}
    return flat
