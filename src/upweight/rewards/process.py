"""Process reward models as rewards: the lowest score of the steps of a completion."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from upweight.config.sections.data import DatasetRow
from upweight.config.sections.model import ModelSection
from upweight.inference.score import ScoreModel, load_score_model
from upweight.rewards.call import parameters_of
from upweight.rewards.reward import Reward


def lowest_step_scores(model: ScoreModel, prompts: list[Any], completions: list[Any]) -> list[float | None]:
    """Return the lowest step probability of each completion; None if it is empty."""
    pairs = zip(prompts, completions, strict=True)
    rows = [{"prompt": _text(prompt), "completion": _text(completion)} for prompt, completion in pairs]
    filled = [number for number, row in enumerate(rows) if row["completion"].strip()]
    scores: list[float | None] = [None] * len(rows)
    for number, steps in zip(filled, model([rows[number] for number in filled]), strict=True):
        scores[number] = min(steps)
    return scores


def is_process_model(place: str) -> bool:
    """Return whether a folder holds a process reward model or an adapter of one."""
    adapter, config = Path(place) / "adapter_config.json", Path(place) / "config.json"
    if adapter.is_file():
        return json.loads(adapter.read_text(encoding="utf-8")).get("task_type") == "TOKEN_CLS"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    return bool(names) and names[0].endswith("ForTokenClassification")


def load_process_reward(place: str, key: str, *, trust_remote_code: bool = False) -> Reward:
    """Load the process reward model of a folder; steps are split as in its training run, else by lines."""
    folder = Path(place)
    adapter, base = None, place
    if (folder / "adapter_config.json").is_file():
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        adapter, base = folder, named["base_model_name_or_path"]
    section = ModelSection(base_model=base, trust_remote_code=trust_remote_code)
    (rows, *_) = run_config(folder).get("datasets") or [{}]
    entry = DatasetRow(step_separator=rows.get("step_separator"))
    function = partial(lowest_step_scores, load_score_model(section, adapter, entry=entry))
    return Reward(folder.name, function, parameters_of(function, folder.name, key), has_timeout=False)


def run_config(folder: Path) -> dict[str, Any]:
    """Return the config of the run that wrote a folder, from it or its parent; empty if there is none."""
    file = next((file for file in (folder / "config.yaml", folder.parent / "config.yaml") if file.is_file()), None)
    content = yaml.safe_load(file.read_text(encoding="utf-8")) if file else None
    return content if isinstance(content, dict) else {}


def _text(value: Any) -> str:
    """Return a text, or the content of the last message, because steps are scored without a chat template."""
    return value if isinstance(value, str) else str(value[-1].get("content") or "") if value else ""
