"""Built-in rewards by name, and how one is written in YAML: `name` or `name(option=value, ...)`."""

import ast
import dataclasses
import re
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from upweight.errors import UserError, did_you_mean

BUILTINS: dict[str, Callable[..., Any]] = {}
T = TypeVar("T")
_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:$|\()")


@dataclass_transform(frozen_default=True, field_specifiers=(Field, dataclasses.field))
def builtin(kind: type[T]) -> type[T]:
    """Make a class the built-in reward of its `__name__`, whose options are its fields."""
    # In Python too, an option that does not exist is an error.
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(kind)
    BUILTINS[vars(kind)["__name__"]] = made
    return made


def builtin_reward(spec: str) -> Callable[..., Any] | None:
    """`name` or `name(option=value, ...)` -> the reward, or None when the name is not a built-in."""
    named = _NAME.match(spec)
    if named is None or named[1] not in BUILTINS:
        return None
    name = named[1]
    options = _known_options(spec, name)
    try:
        return BUILTINS[name](**options)
    except ValidationError as error:
        for detail in error.errors():
            if isinstance(raised := detail.get("ctx", {}).get("error"), UserError):
                raise raised from None  # which pydantic wraps as it does any ValueError
        raise UserError("\n".join(_option_error(name, options, detail) for detail in error.errors())) from error


def check_specs(specs: Sequence[str], key: str) -> None:
    """Raise where a config alone shows that it calls no built-in reward, or one with options that it does not have."""
    for spec in specs:
        name, parenthesis, _ = spec.partition("(")
        if name.strip() in BUILTINS:
            try:
                _known_options(spec, name.strip())
            except UserError as error:
                raise UserError(f"{key}: {error}") from error
        elif parenthesis and "." not in name and "/" not in name:
            raise UserError(f"{key}: there is no built-in reward '{name}'.{did_you_mean(name, BUILTINS)}")


def _known_options(spec: str, name: str) -> dict[str, Any]:
    """Return the options that a spec sets; raise where the reward lacks one of them, or needs another."""
    options = _parse_options(spec, name)
    known = options_of(name)
    for option in options:
        if option not in known:
            meant = did_you_mean(option, known)
            raise UserError(f"Reward '{name}' has no option '{option}'.{meant} It has: {', '.join(known) or 'none'}.")
    missing = [option for option, default in known.items() if default is Parameter.empty and option not in options]
    if missing:
        raise UserError(f"Reward '{name}' needs {', '.join(missing)}, as in {name}({missing[0]}='...').")
    return options


def options_of(name: str) -> dict[str, Any]:
    """A built-in's name -> its options and their defaults (`inspect.Parameter.empty` for one that must be given)."""
    return {option: parameter.default for option, parameter in signature(BUILTINS[name]).parameters.items()}


def _parse_options(spec: str, name: str) -> dict[str, Any]:
    example = f"{name}(option=value, ...) with plain values: numbers, 'text', [lists], True, None"
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return {}
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise UserError(f"Reward {spec!r}: write {example}.")
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            first = next(iter(options_of(name)), None)
            remedy = f"as in {name}({first}=...)" if first else f"and '{name}' has none"
            raise UserError(f"Reward {spec!r}: options are given by name, {remedy}.")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except UserError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
        raise UserError(f"Reward {spec!r} cannot be read ({error}): write {example}.") from error


def _option_error(name: str, options: dict[str, Any], error: Any) -> str:
    option = str(error["loc"][0]) if error["loc"] else ""
    expected = error.get("ctx", {}).get("expected")
    meant = did_you_mean(str(options.get(option)), re.findall(r"'([^']*)'", str(expected)))
    return f"Reward '{name}': option '{option}' = {options.get(option)!r}: {error['msg']}.{meant}"
