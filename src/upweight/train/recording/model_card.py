"""The README.md of a trained model: its base model, data, config and metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import yaml

from upweight.config import Config
from upweight.config.config import general_keys, nested
from upweight.config.redact import redacted
from upweight.config.yaml_file import copy_tree
from upweight.log import counted
from upweight.version import __version__

PRIVATE_SECTIONS = ("run", "callbacks", "tracking")  # folders and accounts are not published
SHOWN_ENDINGS = ("loss", "accuracy", "accuracies", "margins", "margin", "reward", "kl", "entropy")


def card_arguments(given: Mapping[str, Any], of_model: Sequence[str] | None, *, tagged: bool) -> dict[str, Any]:
    """Return a script's arguments as the Trainer's card takes them: TRL's `dataset_name`, and tags unless `tagged`."""
    arguments = {key: value for key, value in given.items() if key != "dataset_name"}
    if (name := given.get("dataset_name")) is not None:
        arguments = {"dataset": name, "dataset_tags": name, **arguments}
    if not tagged:  # by position
        tags = given.get("tags") or []
        arguments["tags"] = [*dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *(of_model or [])])]
    return arguments


def model_card(config: Config, history: Sequence[Mapping[str, Any]], rows: int) -> str:
    """Return the card of a run from its config, the Trainer's log history and the number of training rows."""
    adapted = config.adapter.kind is not None
    base, method = _public_name(config.model.base_model), config.method.name
    head = {
        "base_model": base,
        "library_name": "peft" if adapted else "transformers",
        "tags": ["upweight", method, *(["lora"] if adapted else [])],
        "datasets": [row.path for row in config.data.datasets if _is_hub_id(row.path)],
    }
    what = f"{'An adapter for' if adapted else 'Trained from'} `{base}`, by {method.upper()}"
    types = [f" ({row.type})" if isinstance(row.type, str) else "" for row in config.data.datasets]
    data = [f"- `{_public_name(row.path)}`{kind}" for row, kind in zip(config.data.datasets, types, strict=True)]
    config_yaml = yaml.safe_dump(_set_keys(config), sort_keys=False, allow_unicode=True).rstrip()
    sections = {"Data": data, "Metrics": _metrics_table(history), "Config": ["```yaml", config_yaml, "```"]}
    versions = f"Upweight {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    steps = next((entry["step"] for entry in reversed(history) if "step" in entry), 0)
    return "\n".join([
        "---",
        yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {Path(config.run.hub_model_id or config.run.output_dir).name}",
        "",
        f"{what}, {counted(steps, 'step')} on {counted(rows, 'row')}.",
        "",
        *(line for title, lines in sections.items() for line in (f"## {title}", "", *lines, "")),
        f"{versions}{f', peft {peft.__version__}' if adapted else ''}.",
        "",
    ])  # fmt: skip


def _metrics_table(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the first and last values of the main metrics."""
    values: dict[str, list[float]] = {}
    for name, value in (item for entry in history for item in entry.items()):
        if name.split("/")[-1].endswith(SHOWN_ENDINGS) and name != "train_loss":
            values.setdefault(name, []).append(value)
    lines = [f"| {name} | {logged[0]:.4g} | {logged[-1]:.4g} |" for name, logged in values.items()]
    return ["| metric | first | last |", "|---|---|---|", *lines] if lines else ["None were logged."]


def _set_keys(config: Config) -> dict[str, Any]:
    """Return the config keys that the user set, without private sections; absolute paths are cut to their last part."""
    private = {path for path, (section, _) in general_keys().items() if section in PRIVATE_SECTIONS}
    content = nested((path, value) for path, value in config.set_keys.items() if path not in private)
    return redacted(copy_tree(content, lambda value: _public_name(value) if isinstance(value, str) else value))


def _public_name(source: str | None) -> str:
    """Return a hub id or relative path unchanged, and the last component of an absolute path."""
    path = Path(source or "")
    return path.name if path.is_absolute() or str(source).startswith("~") else str(source or "")


def _is_hub_id(source: str | None) -> bool:
    local = source is None or source.count("/") != 1 or source.startswith((".", "/", "~"))
    return not local and not Path(str(source)).exists()
