"""What other projects call things, as `peers.yaml` lists it: keys that are accepted, renamed or refused, and values."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from upweight.files import packaged_yaml

TABLES: dict[str, Any] = packaged_yaml(Path(__file__).with_suffix(".yaml"))
NO_EFFECT: dict[str, list[str]] = TABLES["no_effect"]
SATISFIED: dict[str, str] = {key: reason for reason, keys in NO_EFFECT.items() for key in keys}
PACKED, FUSED_HEAD = SATISFIED["pad_to_sequence_len"], SATISFIED["trl.use_liger_loss"]
STANDARD_SERVER = SATISFIED["vllm.serve_module"]
REFUSED: dict[str, list[str]] = TABLES["not_here"]
REASONS: dict[str, str] = {key: reason for reason, keys in REFUSED.items() for key in keys}
RENAMED: dict[str, str] = TABLES["renamed"]
KD_KEYS: dict[str, str] = TABLES["kd_keys"]
OTHER_NAMES: dict[str, str] = TABLES["other_names"]
ATTENTION_SWITCHES: dict[str, str] = TABLES["attention_switches"]
ROW_RENAMED: dict[str, str] = TABLES["row_renamed"]
VALUES_MEANING_OFF: dict[str, list[int]] = TABLES["values_of_off"]
ACCELERATOR_OPTIONS: list[str] = TABLES["accelerator_options"]
PLUGINS: dict[str, str] = TABLES["plugins"]
FORMAT_NAMES: dict[str, list[str]] = TABLES["formats"]
TEMPLATE_NAMES: list[str] = TABLES["templates"]["shipped"]
TEMPLATE_ALIASES: dict[str, str] = TABLES["templates"]["aliases"]
IN_TOKENIZERS: list[str] = TABLES["templates"]["in_tokenizers"]  # templates that need no name
SCHEDULE_ARGS: dict[str, dict[str, str | list[str]]] = TABLES["schedules"]
OPTIMIZERS: dict[str, str] = TABLES["optimizers"]
SPELLINGS: dict[str, str] = TABLES["sampling"]  # of sampling options
ZERO_NOT_TAKEN: dict[str, str] = TABLES["deepspeed"]


def why_refused(path: str) -> str | None:
    """Return why a key of another trainer is refused, or None."""
    return REASONS.get(path) or next((reason for key, reason in REASONS.items() if fnmatchcase(path, key)), None)


def method_advice(name: str) -> str:
    """Return what to write for a method of another name, as the end of a message, or an empty text."""
    advice = TABLES["methods"].get(name.strip().lower().replace("-", "_").replace("++", "_plus_plus"))
    return f" {advice[:1].upper()}{advice[1:]}." if advice else ""
