"""Users' methods: a class that `rl` names by its path becomes a method like ours."""

import functools
import inspect
import itertools
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from upweight.config.config import blocks, general_keys, method_keys
from upweight.errors import UserError, did_you_mean
from upweight.lazy_imports import torch
from upweight.methods import METHODS
from upweight.methods.base import KINDS, Method
from upweight.methods.users.function import name_of, path_of
from upweight.methods.users.terms import CHECKED_CALLS
from upweight.settings import keys_of
from upweight.types import Loss, Outputs
from upweight.user_modules import (
    OURS,
    is_path,
    line_of,
    line_of_error,
    load_function,
    named_call,
    named_errors,
)


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
        for method in NAMED:
            # A base class of theirs may be a method that was named already.
            function: Callable[..., Any] = getattr(kind, method)
            function = _unnamed.get(function, function)
            if not str(function.__module__).startswith("upweight."):
                setattr(kind, method, _named(function, method, f"rl: '{name}'"))
        method_keys.cache_clear()
        blocks.cache_clear()
    return kind


def with_registered(content: dict[Any, Any], folder: Path) -> dict[Any, Any]:
    """Return a config's content with the path of its user's method, if it has one, such that it holds anywhere."""
    rl = content.get("rl")
    if not isinstance(rl, str) or not is_path(rl):
        return content
    return {**content, "rl": path_of(register_method(rl, folder))}


def _named(function: Callable[..., Any], method: str, what: str) -> Callable[..., Any]:
    """Return a method of a user's class whose mistakes are said in words, with the name of the class."""
    known = _with_known_needs(function, what) if method in READERS else function
    named = named_call(known, f"{what} failed in {method}")
    checked = _checked_loss(named, what) if method == "loss" else named
    _unnamed[checked] = function
    return checked


_unnamed: dict[Callable[..., Any], Callable[..., Any]] = {}


def _checked_loss(loss: Callable[..., Any], what: str) -> Callable[..., Loss]:
    """Return a user's `loss` that says in words when it returns no sums, no gradient, or at first no finite number."""
    place, calls = line_of(loss), itertools.count(1)

    @functools.wraps(loss)
    def call(self: Method, out: Outputs, *arguments: Any) -> Loss:
        result = loss(self, out, *arguments)
        wanted = 'Return Loss({"name": sum}, metrics), with the names of count() and a tensor of one number for each.'
        if not isinstance(result, Loss):
            raise UserError(f"{what}: loss returned a {type(result).__name__}. {wanted}")
        for key, total in result.sums.items():
            if not torch.is_tensor(total) or total.ndim:
                given = f"of shape {list(total.shape)}" if torch.is_tensor(total) else f"a {type(total).__name__}"
                raise UserError(f"{what}: the sum '{key}' of loss is {given}. {wanted}")
        learned = [value for value in (out.logps_T, out.scores_TC, out.entropy_T) if value is not None]
        if any(one.requires_grad for one in learned) and not any(one.requires_grad for one in result.sums.values()):
            raise UserError(f"{what}: the loss{place} {NO_GRADIENT}")
        if next(calls) <= CHECKED_CALLS and all(one.device.type != "meta" for one in learned):  # meta: check-method
            bad = [key for key, total in result.sums.items() if not bool(total.isfinite())]
            if bad and all(bool(one.isfinite().all()) for one in learned):
                raise UserError(f"{what}: the sum '{bad[0]}' of loss{place} {NOT_FINITE}")
        return result

    return call


NO_GRADIENT = (
    "has no gradient to the weights, so that nothing would be trained. Compute it from out.logps_T (or scores_TC) "
    "without .detach() and outside of torch.no_grad()"
)
NOT_FINITE = (
    "is NaN or infinite, though what the model returned is finite. Guard divisions, roots and logarithms (a sequence "
    "may have no scored token), and bound exponents"
)


def _with_known_needs(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a user's method that says in words when it fails for an output that the class does not ask for."""

    @functools.wraps(method)
    def call(self: Method, out: Outputs, *arguments: Any) -> Any:
        try:
            return method(self, out, *arguments)
        except (TypeError, AttributeError, AssertionError) as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            read = {name for frame in frames if not _is_our_file(frame.f_code) for name in frame.f_code.co_names}
            absent = [name for name in REMEDIES if name in read and getattr(out, name) is None]
            if not absent or ("None" not in str(error) and not isinstance(error, AssertionError)):
                raise
            name, place = absent[0], line_of_error(error)
            raise UserError(f"{what} reads out.{name}{place}, which is not computed: {REMEDIES[name]}") from error

    return call


def _is_our_file(code: types.CodeType) -> bool:
    return code.co_filename.startswith(OURS)


REMEDIES = {
    "ref_logps_T": (
        "`needs_reference = True` is missing. Derive the class from `WithReference, Method` (both in "
        "upweight.methods.base), or define the property `needs_reference` that returns True"
    ),
    **{
        name: f'add it to `reads: ClassVar = frozenset({{"{name}"}})` of the class'
        for name in ("entropy_T", "mean_logit_T", "is_top_T", "log_sum_exp_T", "log_collision_T")
    },
    "logps_T": "with a score head there are no log-probs, but out.scores_TC",
    "scores_TC": 'set `head: ClassVar = "sequence_score"` or `"step_score"`, or use out.logps_T',
}


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


READERS = {"loss", "collect"}  # methods that get outputs
NAMED = {"count", "loss", "collect", "prepare", "advantages"}  # methods whose errors name the user's class
TRAITS = [name for name in vars(Method) if not name.startswith("_")]
