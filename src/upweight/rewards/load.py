"""Loads the rewards that a config or a script names: functions, built-ins, callable objects, reward models."""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from upweight.config.sections.environment import is_environment_reward
from upweight.errors import UserError, did_you_mean
from upweight.rewards.call import ENVIRONMENTS, parameters_of
from upweight.rewards.environment import EpisodeReward, environment_rewards
from upweight.rewards.model import ModelOptions, load_model_reward, model_reward
from upweight.rewards.reward import Reward, unique_names
from upweight.rewards.worker import BUILTIN, Source
from upweight.user_modules import describe_error, load_function, local_file

KEY = "trl.reward_funcs"
ON_CPU = ModelOptions()


@dataclass(frozen=True)
class _LoadContext:
    """Where names are resolved, how reward models are loaded, and which rewards the environment returns."""

    folder: Path
    key: str
    models: ModelOptions
    environment: Sequence[str]  # names of the rewards that it returns


def load_rewards(
    names: Sequence[str], folder: Path, *, models: ModelOptions = ON_CPU, environment: Sequence[str] = ()
) -> list[Reward]:
    """Load the rewards that a config in `folder` names.

    `environment`: names of the rewards that the environment returns. They are inserted once, at the first name that
    refers to them; if no reward is named, they are the only ones.
    """
    place = _LoadContext(folder, KEY, models, environment)
    rewards = _load_items(((name, None) for name in names), place)
    return unique_names(rewards if names else environment_rewards(environment))


def as_rewards(
    reward_funcs: Any, tokenizers: Any = None, *, models: ModelOptions = ON_CPU, environment: Sequence[str] = ()
) -> list[Reward]:
    """Load the rewards that a script passes: names, functions, objects, models or (model, tokenizer), one or a list.

    `environment`: names of the rewards that the environment returns; they come last if they are not named.
    """
    place = _LoadContext(Path.cwd(), "reward_funcs", models, environment)
    is_pair = isinstance(reward_funcs, tuple) and len(reward_funcs) == 2 and isinstance(reward_funcs[0], nn.Module)
    items = (
        list(reward_funcs)
        if isinstance(reward_funcs, list | tuple) and not is_pair
        else []
        if reward_funcs is None
        else [reward_funcs]
    )
    tokenizer_list = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(items)
    if len(tokenizer_list) != len(items):
        raise UserError(
            f"reward_processing_classes: {len(tokenizer_list)} given for {len(items)} rewards; pass one for each."
        )
    rewards = _load_items(zip(items, tokenizer_list, strict=True), place)
    return unique_names(rewards if _has_environment_rewards(rewards) else [*rewards, *environment_rewards(environment)])


def _load_items(items: Iterable[tuple[Any, Any]], where: _LoadContext) -> list[Reward]:
    """Load the rewards of entries, each with the tokenizer it may need; the environment's rewards are added once."""
    rewards: list[Reward] = []
    for item, tokenizer in items:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], nn.Module):
            rewards.append(model_reward(item[0].to(where.models.device), item[1], key=where.key))
        elif isinstance(item, nn.Module) and hasattr(item, "config"):
            rewards.append(model_reward(item.to(where.models.device), tokenizer, key=where.key))
        elif isinstance(item, str) and is_environment_reward(item):
            if not where.environment:
                raise UserError(f"{where.key}: '{item}' needs an environment that returns rewards, and there is none.")
            rewards += [] if _has_environment_rewards(rewards) else environment_rewards(where.environment)
        elif isinstance(item, str):
            rewards.append(_named(item, where))
        elif callable(item):
            rewards.append(_of_function(item, where.key, _source_of(item)))
        else:
            raise UserError(f"{where.key}: a {type(item).__name__} is no reward; pass a function, a name or a model.")
    return rewards


def _has_environment_rewards(rewards: Sequence[Reward]) -> bool:
    return any(isinstance(reward.function, EpisodeReward) for reward in rewards)


def _named(name: str, where: _LoadContext) -> Reward:
    from upweight.rewards.builtin import BUILTINS, builtin_reward

    bare = name.partition("(")[0].strip()
    if "." not in bare and "/" not in bare:
        try:
            builtin = builtin_reward(name)
        except UserError as error:
            raise UserError(f"{where.key}: {error}") from error
        if builtin is not None:
            return _of_function(builtin, where.key, (BUILTIN, name, None))
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
    """Build a reward from a function, a class (which is instantiated), or a callable object."""
    if inspect.isclass(function):
        function, source = _instance_of(function, key), None
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    parameters = parameters_of(function, name, key)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return Reward(name, function, parameters, "async")
    is_builtin = source is not None and source[0] == BUILTIN and not getattr(function, "stateful", False)
    if source is not None and (inspect.isfunction(function) or is_builtin) and ENVIRONMENTS not in parameters.named:
        return Reward(name, function, parameters, "worker", source)
    return Reward(name, function, parameters)


def _instance_of(kind: type, key: str) -> Any:
    try:
        instance: Any = kind()
    except (Exception, SystemExit) as error:  # foreign code
        raise UserError(
            f"{key}: a {kind.__name__} cannot be created without arguments: {describe_error(error)}"
        ) from error
    if not callable(instance):
        raise UserError(f"{key}: objects of {kind.__name__} cannot be called; give the class a __call__.")
    return instance


def _source_of(function: Callable[..., Any]) -> Source | None:
    """Return where another process can import a function; None for closures, lambdas, objects and `__main__`."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or file is None or "<" in name or function.__module__ == "__main__":
        return None
    resolved: Any = module
    for part in name.split("."):
        resolved = getattr(resolved, part, None)
    if resolved is not function or Path(file).suffix != ".py":
        return None
    return function.__module__.removeprefix("upweight_user."), name, str(Path(file).resolve())
