"""Reads `trl.generation_kwargs`, with the field names of `Sampling` or those of vLLM and transformers."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from upweight.config.peers import SPELLINGS
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import did_you_mean

KEY = "trl.generation_kwargs"
FIELDS = {"max_new_tokens": int, "top_k": int, "stop_ids": int, "stop_strings": str}
FIELDS |= dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float)
ALWAYS_ON = ("do_sample",)  # completions of a group must differ: sampling is always on
LIST_OPTIONS = ("stop_ids", "stop_strings")  # a value or a list of values


def read_options(kwargs: Mapping[str, Any], *, others: bool) -> tuple[dict[str, Any], list[str]]:
    """Return options by their `Sampling` names, and errors; unknown names are errors unless `others` are allowed."""
    options: dict[str, Any] = {}
    errors: list[str] = []
    for key, value in kwargs.items():
        name = SPELLINGS.get(key, key)
        if key in ALWAYS_ON and value is not True:
            errors.append(f"{KEY}: {key}: false makes all completions of a group alike: drop it.")
        elif name in FIELDS and (problem := _value_error(name, value)):
            errors.append(f"{KEY}: '{key}'{problem}.")
        elif name in FIELDS:
            options[name] = tuple(_values_of(name, value)) if name in LIST_OPTIONS else FIELDS[name](value)
        elif key not in ALWAYS_ON and not others:
            hint = f"{did_you_mean(key, (*FIELDS, *SPELLINGS))} It knows {', '.join((*FIELDS, *SPELLINGS))}."
            errors.append(f"{KEY}: '{key}' is not an option of sampling here.{hint}")
    return options, errors


def _value_error(name: str, value: Any) -> str | None:
    """Return the error in an option's value, if any."""
    wanted = (int, float) if FIELDS[name] is float else FIELDS[name]
    if any(not isinstance(item, wanted) or isinstance(item, bool) for item in _values_of(name, value)):
        return f" must be {FIELDS[name].__name__}{' or a list' if name in LIST_OPTIONS else ''}"
    if name == "max_new_tokens" and value < 1:
        return f": at least 1, got {value}"
    if name in RolloutSection.model_fields:
        try:
            RolloutSection(**{name: value})  # applies the limits of the key with that name
        except ValidationError as error:
            return f": {error.errors()[0]['msg']}, got {value}"
    return None


def _values_of(name: str, value: Any) -> list[Any]:
    return list(value) if name in LIST_OPTIONS and isinstance(value, list | tuple) else [value]
