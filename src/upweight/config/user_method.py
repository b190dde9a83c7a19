"""Users' methods: a class that `rl` names by its path becomes a method like ours."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upweight.config.config import blocks, general_keys, method_keys
from upweight.errors import UserError, did_you_mean
from upweight.lazy_torch import torch
from upweight.methods import METHODS
from upweight.methods.base import KINDS, Method
from upweight.methods.users.function import name_of, path_of
from upweight.settings import keys_of
from upweight.types import Loss
from upweight.user_modules import is_path, load_function, named_errors, named_method


def register_method(path: str, folder: Path) -> type[Method]:
    """Load the class at a path, check that it is a whole method, and add it to the methods under its name."""
    kind = load_function(path, folder, "rl")
    if not (inspect.isclass(kind) and issubclass(kind, Method)):
        remedy = "Derive it from upweight.methods.base.Method; a loss alone is named by 'trl.loss_type' and its like."
        raise UserError(f"rl: '{path}' is no method but a {type(kind).__name__}. {remedy}")
    name = name_of(kind)
    if problems := list(_problems(kind)):
        raise UserError("\n".join(f"rl: '{name}' {problem}" for problem in problems))
    if METHODS.get(name) is not kind:
        METHODS[name], kind.name = kind, name
        for method in NAMED & vars(kind).keys():
            named = named_method(kind, method, f"rl: '{name}'")
            setattr(kind, method, _checked_loss(named, name) if method == "loss" else named)
        method_keys.cache_clear()
        blocks.cache_clear()
    return kind


def with_registered(content: dict[Any, Any], folder: Path) -> dict[Any, Any]:
    """Return a config's content with the path of its user's method, if it has one, such that it holds anywhere."""
    rl = content.get("rl")
    if not isinstance(rl, str) or not is_path(rl):
        return content
    return {**content, "rl": path_of(register_method(rl, folder))}


def _checked_loss(loss: Callable[..., Any], name: str) -> Callable[..., Loss]:
    """Return a user's `loss` that says in words when it does not return sums."""

    @functools.wraps(loss)
    def call(self: Method, *arguments: Any) -> Loss:
        result = loss(self, *arguments)
        wanted = 'Return Loss({"name": sum}, metrics), with the names of count() and a tensor of one number for each.'
        if not isinstance(result, Loss):
            raise UserError(f"rl: '{name}': loss returned a {type(result).__name__}. {wanted}")
        for key, total in result.sums.items():
            if not torch.is_tensor(total) or total.ndim:
                given = f"of shape {list(total.shape)}" if torch.is_tensor(total) else f"a {type(total).__name__}"
                raise UserError(f"rl: '{name}': the sum '{key}' of loss is {given}. {wanted}")
        return result

    return call


def _problems(kind: type[Method]) -> list[str]:
    """Return what a class lacks to be a method."""
    if kind.__abstractmethods__:
        return [f"has no {' and no '.join(sorted(kind.__abstractmethods__))}"]
    data = getattr(kind, "data", None)
    if data not in KINDS and not isinstance(data, property):
        return [f"needs `data: ClassVar = ...`, the kind of its rows: {', '.join(KINDS)}; got {data!r}"]
    problems = []
    for name, field in kind.model_fields.items():
        if not isinstance(field.json_schema_extra, dict):
            return [f'declares \'{name}\' without its key: write `{name}: ... = setting("{name}", default, "Help.")`']
    for key in keys_of(kind):
        if key.path in general_keys():
            problems.append(f"declares the key '{key.path}', which every run has already; name it otherwise")
        elif "." in key.path and key.path.split(".")[0] in general_keys():
            problems.append(f"declares '{key.path}' under '{key.path.split('.')[0]}', which is no block of keys")
    with named_errors(f"rl: '{name_of(kind)}' cannot be built with its defaults"):
        method = kind()
    if method.online and method.online_settings is None:
        problems.append(
            "is online and has no `online_settings`; derive it from GRPO, or from PolicyGradient and Method"
        )
    stray = [
        name for name in vars(kind) if name not in dir(Method) and name[0] != "_" and name not in kind.model_fields
    ]
    near = [(name, did_you_mean(name, TRAITS, 0.8)) for name in stray if callable(vars(kind)[name])]
    return problems + [f"defines '{name}', which nothing calls.{hint}" for name, hint in near if hint]


NAMED = {"count", "loss", "collect", "prepare", "advantages"}  # methods whose errors name the user's class
TRAITS = [name for name in vars(Method) if not name.startswith("_")]
