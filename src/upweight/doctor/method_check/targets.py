"""What `upweight check-method` is given: a config, or users' functions and classes, as methods to check."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from upweight.config import load_config
from upweight.config.explain import explain
from upweight.config.user_method import register_method
from upweight.errors import UserError, closest
from upweight.methods import DPO, GRPO, KTO, SFT
from upweight.methods.base import Method
from upweight.methods.users.function import UserFunction, name_of, path_of
from upweight.methods.users.policy import ADVANTAGES
from upweight.methods.users.terms import LABELLED, PAIRS, POLICY, TOKENS
from upweight.settings import keys_of
from upweight.user_modules import asked_names, load_file, load_function, named_errors

Place = Literal["grpo", "advantages", "dpo", "kto", "sft"]
NAMES: dict[Place, tuple[str, ...]] = {
    "advantages": ADVANTAGES, "dpo": PAIRS, "kto": LABELLED, "grpo": POLICY, "sft": TOKENS,
}  # fmt: skip


def methods_of(
    target: str, options: Mapping[str, Any], place: Place | None, folder: Path
) -> dict[str, Method | UserError]:
    """Return the methods to check by name: of a config, of a file's functions and classes, or of one by its path.

    A function of a file of which no method can be made has the error instead, so that the others are checked.
    """
    file = (folder / target).resolve()
    if target.endswith((".yaml", ".yml")):
        config = load_config(file, [f"{key}={value}" for key, value in options.items()], fragment=True)
        return {stage.method.name: stage.method for stage in config.stages or (config,)}
    if not target.endswith(".py"):
        function = load_function(target, folder, target)
        return {name_of(function): _method(function, options, place, folder)}
    if not file.is_file():
        raise UserError(f"{target}: there is no such file")
    with named_errors(f"{target} cannot be imported"):
        module = load_file(file.stem, file)
    every = [one for name, one in vars(module).items() if name[0] != "_" and _is_from(one, module.__name__)]
    candidates = [one for one in every if _is_candidate(one)]
    if not candidates:
        wanted = (
            "Name what it needs as `upweight docs your_own_method` does, such as `ratio`, `rewards`, `chosen_logps`."
        )
        asked = "".join(f" '{one.__name__}' asks for {', '.join(asked_names(one)) or 'nothing'}." for one in every[:4])
        lacking = "has no Method, and no function that asks for what losses or advantages get"
        raise UserError(f"{target}: {lacking}.{asked} {wanted}")
    settable = {one: _settable(one, place) for one in candidates}
    methods: dict[str, Method | UserError] = {}
    for one in candidates:
        others = {name for other in candidates if other is not one for name in settable[other]} - settable[one]
        try:
            settings = {name: value for name, value in options.items() if name not in others}
            methods[name_of(one)] = _method(one, settings, place, folder)
        except UserError as error:
            methods[name_of(one)] = error if options or inspect.isclass(one) else UserError(f"{error} {HELPERS}")
    return methods


def helpers_of(target: str, folder: Path) -> list[str]:
    """Return the names of a file's functions that are not checked, since they ask for nothing that losses get."""
    if not target.endswith(".py"):
        return []
    file = (folder / target).resolve()
    module = load_file(file.stem, file)
    every = [one for name, one in vars(module).items() if name[0] != "_" and _is_from(one, module.__name__)]
    return [one.__name__ for one in every if not _is_candidate(one)]


HELPERS = "If it is a helper that another function calls, begin its name with an underscore."
METHOD_OF: dict[Place, type[Method]] = {"advantages": GRPO, "dpo": DPO, "kto": KTO, "grpo": GRPO, "sft": SFT}
# A function that asks for one of these is a loss, and no helper, even if its place is not clear.
TERMS = {"logps", "ref_logps", "entropy"}


def _is_candidate(one: Any) -> bool:
    """Whether a class or function is a method, a loss or advantages, or was meant as such by names nearly right."""
    return inspect.isclass(one) or bool(_places(one) or TERMS & set(asked_names(one)) or _near_names(one))


def _near_names(function: Callable[..., Any]) -> dict[str, str]:
    """Return the names that a function asks for and that are nearly those of what losses get, with the right ones."""
    known = {name for names in NAMES.values() for name in names}
    near = {name: closest(name, sorted(known), NEAR) for name in asked_names(function) if name not in known}
    return {name: right for name, right in near.items() if right is not None}


NEAR = 0.85  # so that arguments of helpers, as `values` or `masked`, are not taken for names of ours


def _is_from(value: Any, module: str) -> bool:
    kind = inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, Method))
    return kind and value.__module__ == module


def _places(function: Callable[..., Any]) -> list[Place]:
    """Return where a function can stand: the places with names that it asks for and that no other place has."""
    asked = set(asked_names(function))
    places: list[Place] = []
    for place, names in NAMES.items():
        others = {name for other, known in NAMES.items() if other != place for name in known}
        if asked & (set(names) - others):
            places.append(place)
    if not places and "log_ratio" in asked:
        places = ["grpo"]
    return places


def _method(one: Any, options: Mapping[str, Any], place: Place | None, folder: Path) -> Method:
    """Return the method in which a function has its place, or an object of a class."""
    if inspect.isclass(one):
        return _built(register_method(path_of(one), folder), options)
    place = _place(one, place)
    setting, kind = "advantage_estimator" if place == "advantages" else "loss_type", METHOD_OF[place]
    paths = _paths(kind)
    settings = {paths[name]: value for name, value in options.items() if name in paths}
    rest = {name: value for name, value in options.items() if name not in paths}
    return _built(kind, {**settings, setting: UserFunction.of(one), "method_args": rest})


def _place(function: Callable[..., Any], asked: Place | None) -> Place:
    """Return where a function stands; `asked` decides where its names do not."""
    places = _places(function) or _possible(function)
    if asked and (len(places) != 1 or asked in places):  # in a file of several, the others keep their places
        return asked
    if len(places) != 1:
        several = f"can be a loss of {' or '.join(places)}" if places else "asks for nothing that losses get"
        remedy = f"Say which with --as ({', '.join(NAMES)})."
        if not places and (near := _near_names(function)):
            meant = " and ".join(f"'{right}'" for right in near.values())
            several, remedy = f"asks for {', '.join(map(repr, near))}, which nothing passes", f"Did you mean {meant}?"
        raise UserError(f"'{name_of(function)}' {several}. {remedy}")
    return places[0]


def _settable(one: Any, place: Place | None) -> set[str]:
    """Return the settings of a function and of the methods in which it may stand, or of a class."""
    if inspect.isclass(one) and issubclass(one, Method):
        return set(_paths(one))
    places = _places(one) or ([place] if place else _possible(one))
    return {*asked_names(one), *(path for known in places for path in _paths(METHOD_OF[known]))}


def _paths(kind: type[Method]) -> dict[str, str]:
    """Return the names of a method's settings by their keys in a config and by themselves."""
    return {path: key.name for key in keys_of(kind) for path in (key.path, key.name)}


def _possible(function: Callable[..., Any]) -> list[Place]:
    """Return the places that have all the common names which a function asks for."""
    common = TERMS & set(asked_names(function))
    return [place for place, names in NAMES.items() if common and common <= set(names)]


def _built(kind: type[Method], values: Mapping[str, Any]) -> Method:
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise UserError("\n".join(reason for _, reason in explain(error, kind, dict(values)))) from None
