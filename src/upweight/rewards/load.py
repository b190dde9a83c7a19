"""From what a config or a script names to rewards: functions, built-ins, callable objects, reward models."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from upweight.config.sections.environment import is_environment_reward
from upweight.errors import UserError, did_you_mean
from upweight.rewards.call import takes
from upweight.rewards.environment import EpisodeReward, environment_rewards
from upweight.rewards.model import ModelOptions, load_model_reward, model_reward
from upweight.rewards.reward import Reward, unique_names
from upweight.rewards.worker import BUILTIN, Source
from upweight.user_modules import described, load_function, local_file

KEY = "trl.reward_funcs"
ON_CPU = ModelOptions()


@dataclass(frozen=True)
class _Place:
    """Where names are looked up, how reward models are loaded, and what else gives rewards."""

    folder: Path
    key: str
    models: ModelOptions
    environment: Sequence[str]  # names of the rewards that it gives


def load_rewards(
    names: Sequence[str], folder: Path, *, models: ModelOptions = ON_CPU, environment: Sequence[str] = ()
) -> list[Reward]:
    """The rewards that a config in `folder` names.

    `environment`: names of the rewards that the environment gives. They stand, once, where the first name that means
    them does; where nothing is named they are all there is.
    """
    place = _Place(folder, KEY, models, environment)
    made = _listed(((name, None) for name in names), place)
    return unique_names(made if names else environment_rewards(environment))


def as_rewards(
    given: Any, tokenizers: Any = None, *, models: ModelOptions = ON_CPU, environment: Sequence[str] = ()
) -> list[Reward]:
    """The rewards that a script gives: names, functions, objects, models or (model, tokenizer), one or a list.

    `environment`: names of the rewards that the environment gives; they come last where they are not named.
    """
    place = _Place(Path.cwd(), "reward_funcs", models, environment)
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)
    listed = list(given) if isinstance(given, list | tuple) and not is_pair else [] if given is None else [given]
    beside = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(listed)
    if len(beside) != len(listed):
        raise UserError(f"reward_processing_classes: {len(beside)} given for {len(listed)} rewards; give one for each.")
    made = _listed(zip(listed, beside, strict=True), place)
    return unique_names(made if _has_episodes(made) else [*made, *environment_rewards(environment)])


def _listed(items: Iterable[tuple[Any, Any]], where: _Place) -> list[Reward]:
    """The rewards that entries stand for, each given with the tokenizer it may need; the environment's own once."""
    made: list[Reward] = []
    for item, tokenizer in items:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], nn.Module):
            made.append(model_reward(item[0].to(where.models.device), item[1], key=where.key))
        elif isinstance(item, nn.Module) and hasattr(item, "config"):
            made.append(model_reward(item.to(where.models.device), tokenizer, key=where.key))
        elif isinstance(item, str) and is_environment_reward(item):
            if not where.environment:
                why = "is what an environment says of an episode, and there is none that says any"
                raise UserError(f"{where.key}: '{item}' {why}.")
            made += [] if _has_episodes(made) else environment_rewards(where.environment)
        elif isinstance(item, str):
            made.append(_named(item, where))
        elif callable(item):
            made.append(_of_function(item, where.key, _source_of(item)))
        else:
            raise UserError(f"{where.key}: a {type(item).__name__} is no reward; give a function, a name or a model.")
    return made


def _has_episodes(rewards: Sequence[Reward]) -> bool:
    return any(isinstance(reward.function, EpisodeReward) for reward in rewards)


def _named(name: str, where: _Place) -> Reward:
    from upweight.rewards.builtin import BUILTINS, builtin_reward

    bare = name.partition("(")[0].strip()
    if "." not in bare and "/" not in bare:
        try:
            found = builtin_reward(name)
        except UserError as error:
            raise UserError(f"{where.key}: {error}") from error
        if found is not None:
            return _of_function(found, where.key, (BUILTIN, name, None))
    folder = next((root / name for root in (Path(), where.folder) if (root / name).is_dir()), None)
    file = local_file(name, where.folder)
    if "." in bare and "/" not in bare and (folder is None or file is not None):
        module, _, attribute = name.rpartition(".")
        function = load_function(name, where.folder, where.key)
        return _of_function(function, where.key, (module, attribute, str(file) if file else None))
    if folder is not None or "/" in name:
        return load_model_reward(str(folder or name), where.models, where.key)
    raise UserError(
        f"{where.key}: there is no reward '{name}': no built-in of that name and no folder with a reward model."
        f"{did_you_mean(bare, BUILTINS)} A function is named as 'file.function', a model on the hub as 'owner/name'."
    )


def _of_function(function: Callable[..., Any], key: str, source: Source | None) -> Reward:
    """A reward from a function, from a class (an object of it is made), or from a callable object."""
    if inspect.isclass(function):
        function, source = _object_of(function, key), None
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    parameters = takes(function, name, key)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return Reward(name, function, parameters, "async")
    is_builtin = source is not None and source[0] == BUILTIN and not getattr(function, "stateful", False)
    if source is not None and (inspect.isfunction(function) or is_builtin):
        return Reward(name, function, parameters, "worker", source)
    return Reward(name, function, parameters)


def _object_of(kind: type, key: str) -> Any:
    try:
        made: Any = kind()
    except (Exception, SystemExit) as error:  # foreign code
        raise UserError(f"{key}: a {kind.__name__} cannot be made without arguments: {described(error)}") from error
    if not callable(made):
        raise UserError(f"{key}: objects of {kind.__name__} cannot be called; give the class a __call__.")
    return made


def _source_of(function: Callable[..., Any]) -> Source | None:
    """Where another process finds a function; None for closures, lambdas, objects and what the script itself holds."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or file is None or "<" in name or function.__module__ == "__main__":
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function or Path(file).suffix != ".py":
        return None
    return function.__module__.removeprefix("upweight_user."), name, str(Path(file).resolve())
