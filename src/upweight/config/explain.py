"""Turns pydantic's validation errors into messages that name the YAML path and the reason."""

import datetime
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from upweight.config.peers import method_advice
from upweight.errors import closest, did_you_mean
from upweight.methods.users.function import UserFunction
from upweight.settings import UserPath, branches, literals

Path = tuple[str | int, ...]
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
WORDS |= {UserPath: "the path of your code", UserFunction: "the path of your function"}
SEPARATORS = {"delimiter", "sep", "separator"}  # what readers of CSVs call it
NONE_WORDS = ("none", "no", "off", "nothing")
LIMITS = {"gt": "greater than", "ge": "at least", "lt": "below", "le": "at most"}


def show(path: Path) -> str:
    """Format a path in YAML notation: `datasets[0].type`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def explain(error: ValidationError, model: type[BaseModel], values: dict[str, Any]) -> list[tuple[Path, str]]:
    """Return the path inside `values` and the reason of each error, with one error for each path."""
    errors: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        errors.setdefault(_real_path(item["loc"], item["type"], values), []).append(item)
    innermost = [path for path in errors if not any(deeper[: len(path)] == path != deeper for deeper in errors)]
    return [(path, _reason(errors[path], path, model)) for path in innermost]


def _real_path(loc: tuple[int | str, ...], kind: str, value: Any) -> Path:
    """Return the location without the names that pydantic inserts for the branches of a union."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        missing_here = kind == "missing" and position == len(loc) - 1
        if isinstance(value, dict) and (part in value or missing_here or kind == "invalid_key"):
            value = value.get(part)
        elif isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _reason(items: list[Any], path: Path, model: type[BaseModel]) -> str:
    # What loading a user's function says is more than that no other branch takes the value.
    item = next((one for one in items if one["type"] == "value_error"), items[0])
    kind, value = item["type"], item["input"]
    if kind == "extra_forbidden":
        return _unknown_key(str(path[-1]), annotations_at(model, path[:-1]))
    if kind == "missing":
        return "this key is required here"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    limit = item.get("ctx", {})
    if kind == "too_short":
        return f"expected a list of at least {limit['min_length']}, got {brief(value)}"
    for name, words in LIMITS.items():
        if name in limit:
            return f"must be {words} {limit[name]:g}, got {brief(value)}"
    allowed = annotations_at(model, path)
    expected = list(dict.fromkeys(describe(part) for part in allowed))
    if not expected:
        return f"{item['msg'][:1].lower()}{item['msg'][1:]}, got {brief(value)}"
    choices = [choice for part in allowed for choice in literals(part)]
    if expected == ["a list"] and isinstance(value, str) and choices and value not in choices:
        expected = [f"a list of {', '.join(choices)}"]
    hint = ""
    if isinstance(value, str):
        hint = did_you_mean(value, choices, cutoff=0.7) or _corrected_form(value, expected, allowed)
        hint = (method_advice(value) if path == ("rl",) else "") or hint
        hint = hint or _left_out(value, path, model)
    if "a list" in expected and isinstance(value, dict):
        hint = " Begin each entry with '- '; in an override an entry has its number, from 0."
    if isinstance(value, datetime.date) or (isinstance(value, bool) and "text" in " ".join(expected)):
        hint = " Put it in quotes."
    return f"expected {' or '.join(expected)}, got {brief(value)}.{hint}"


def _left_out(value: str, path: Path, model: type[BaseModel]) -> str:
    """Return that a key is left out for none, where a word for none stands in one that may be unset."""
    field = model.model_fields.get(str(path[0])) if len(path) == 1 else None
    is_none = field is not None and field.default is None and value.lower() in NONE_WORDS
    return " Leave it out for none." if is_none else ""


def _corrected_form(value: str, expected: list[str], allowed: list[Any]) -> str:
    """Show how to write a string where a list, or a mapping with a `path`, is expected."""
    entries = [inner for part in allowed for inner in _inner_annotations(part, 0)] if "a list" in expected else allowed
    has_path = any("path" in dict(_fields_inside(entry)) for entry in entries)
    entry = f"{{path: {value}}}" if has_path else brief(value)
    entry = f"[{entry}]" if "a list" in expected else entry
    return f" Write {entry}." if has_path or "a list" in expected else ""


def _unknown_key(key: str, parents: list[Any]) -> str:
    """Return the error message for a key that a nested mapping does not have."""
    known = {name: field for parent in parents for name, field in _fields_inside(parent)}
    if key in SEPARATORS and "path" in known:
        return "unknown key. What separates the cells of a CSV is read from its first line; leave the key out."
    home = next((name for name, field in known.items() if key in dict(_fields_inside(field.annotation))), None)
    return f"unknown key.{did_you_mean(key, known)}" if home is None else f"belongs under '{home}'"


def rename_unknown(values: dict[str, Any], path: Path, model: type[BaseModel]) -> Path | None:
    """Give an unknown key of a nested mapping the name that was likely meant; return its path, None for other keys."""
    inside: Any = values
    for part in path[:-1]:
        inside = inside[part]
    known = {name for parent in annotations_at(model, path[:-1]) for name, _ in _fields_inside(parent)}
    if len(path) < 2 or not isinstance(inside, dict) or path[-1] in known or path[-1] not in inside:
        return None
    near, value = closest(str(path[-1]), known), inside.pop(path[-1])
    if near is not None:
        inside.setdefault(near, value)
    return (*path[:-1], near or path[-1])


def brief(value: Any) -> str:
    """Format a value as in YAML, cut to 60 characters."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = value.isoformat() if isinstance(value, datetime.date) else ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def describe(annotation: Any) -> str:
    """Describe a type annotation in words."""
    return " or ".join(dict.fromkeys(map(_describe_branch, branches(annotation))))


def _describe_branch(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if origin in (list, tuple, set):
        return "a list"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel | dict)):
        return "a mapping"
    return WORDS.get(annotation, "another kind of value")


def annotations_at(model: type[BaseModel], path: Path) -> list[Any]:
    """Return the types allowed at a path inside a model; a union gives several."""
    current: list[Any] = [model]
    for part in path:
        current = [inner for annotation in current for inner in _inner_annotations(annotation, part)]
    return current


def _fields_inside(annotation: Any) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of every model that a type annotation allows."""
    for branch in branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            yield from branch.model_fields.items()


def _inner_annotations(annotation: Any, part: str | int) -> Iterator[Any]:
    yield from (field.annotation for name, field in _fields_inside(annotation) if name == part)
    for branch in branches(annotation):
        if get_origin(branch) in (list, tuple) and isinstance(part, int):
            yield get_args(branch)[0]
        elif get_origin(branch) is dict:
            yield get_args(branch)[1]
