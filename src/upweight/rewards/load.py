"""Loads the rewards that a config or a script names: functions, built-ins, objects, models, the environment's."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from upweight.config.sections.environment import ENVIRONMENT_REWARDS, is_environment_reward
from upweight.errors import UserError, did_you_mean
from upweight.log import counted
from upweight.rewards import __all__ as rewards_of_trl
from upweight.rewards.builtin import BUILTINS, builtin_reward
from upweight.rewards.model import ModelOptions, load_model_reward, model_reward
from upweight.rewards.reward import ENVIRONMENTS, Reward, RewardParameters, parameters_of, unique_names
from upweight.rewards.workers import BUILTIN, Source
from upweight.user_modules import describe_error, load_function, local_file

KEY = "trl.reward_funcs"
EPISODE = "episode"  # column of a call with the episode of each completion
NO_OPTIONS = ModelOptions()


@dataclass(frozen=True)
class _EpisodeReward:
    """Reads one named reward of each episode, which the environment returned; None if the episode has none."""

    component: str

    def __call__(self, completions: Sequence[Any], episode: Sequence[Mapping[str, Any] | None] = ()) -> list[Any]:
        episodes = [info or {} for info in episode] or [{}] * len(completions)
        return [info.get("rewards", {}).get(self.component) for info in episodes]


def _environment_rewards(names: Sequence[str]) -> list[Reward]:
    """Return one reward for each component name; a single one gets the name that configs use."""
    parameters = RewardParameters(("completions", EPISODE), (), everything=False)
    shown = names if len(names) > 1 else [ENVIRONMENT_REWARDS[0]] * len(names)
    pairs = zip(shown, map(_EpisodeReward, names), strict=True)
    return [Reward(name, function, parameters, has_timeout=False) for name, function in pairs]


def load_rewards(
    names: Sequence[str], folder: Path, *, models: ModelOptions = NO_OPTIONS, environment: Sequence[str] = ()
) -> list[Reward]:
    """Load the rewards that a config in `folder` names; those of the `environment` if it names none."""
    rewards = _load_items(((name, None) for name in names), environment, folder, KEY, models)
    return unique_names(rewards if names else _environment_rewards(environment))


def as_rewards(
    reward_funcs: Any, tokenizers: Any = None, *, models: ModelOptions = NO_OPTIONS, environment: Sequence[str] = ()
) -> list[Reward]:
    """Load what a script passes: names, functions, objects, models or (model, tokenizer); the `environment`'s last."""
    is_list = isinstance(reward_funcs, list | tuple) and not _has_tokenizer(reward_funcs)
    items = list(reward_funcs or ()) if is_list or reward_funcs is None else [reward_funcs]
    given = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(items)
    if len(given) != len(items):
        count = f"{len(given)} given for {counted(len(items), 'reward')}"
        raise UserError(f"reward_processing_classes: {count}; pass one for each.")
    pairs = zip(items, given, strict=True)
    rewards = _load_items(pairs, environment, Path.cwd(), "reward_funcs", models)
    named = any(isinstance(reward.function, _EpisodeReward) for reward in rewards)
    return unique_names(rewards if named else [*rewards, *_environment_rewards(environment)])


def _has_tokenizer(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], nn.Module)


def _load_items(
    items: Iterable[tuple[Any, Any]], environment: Sequence[str], folder: Path, key: str, models: ModelOptions
) -> list[Reward]:
    """Load entries, each with the tokenizer it may need; the environment's rewards go where they are first named."""
    rewards: list[Reward] = []
    for entry, given in items:
        item, tokenizer = entry if _has_tokenizer(entry) else (entry, given)
        if isinstance(item, nn.Module) and hasattr(item, "config"):
            rewards.append(model_reward(item.to(models.device), tokenizer, models, key))
        elif isinstance(item, str) and is_environment_reward(item):
            if not environment:
                raise UserError(f"{key}: '{item}' needs an environment that returns rewards, and there is none.")
            if not any(isinstance(reward.function, _EpisodeReward) for reward in rewards):
                rewards += _environment_rewards(environment)
        elif isinstance(item, str):
            rewards.append(_load_by_name(item, folder, key, models))
        elif callable(item):
            rewards.append(_reward_from_function(item, key, _source_of(item)))
        else:
            raise UserError(f"{key}: a {type(item).__name__} is no reward; pass a function, a name or a model.")
    return rewards


def _load_by_name(name: str, folder: Path, key: str, models: ModelOptions) -> Reward:
    bare = name.partition("(")[0].strip()
    if "." not in bare and "/" not in bare:
        try:
            builtin = builtin_reward(name)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        if builtin is not None:
            return _reward_from_function(builtin, key, (BUILTIN, name, None))
    model = next((root / name for root in (Path(), folder) if (root / name).is_dir()), None)
    file = local_file(name, folder)
    if "." in bare and "/" not in bare and (model is None or file is not None):
        module, _, attribute = name.rpartition(".")
        function = load_function(name, folder, key)
        return _reward_from_function(function, key, (module, attribute, str(file) if file else None))
    if model is not None or "/" in name:
        return load_model_reward(str(model or name), models, key)
    problem = f"there is no reward '{name}': no built-in of that name and no folder with a reward model."
    remedy = "A function is named as 'file.function', a model on the hub as 'owner/name'."
    if bare in rewards_of_trl:
        remedy = f"Write 'upweight.rewards.{bare}'."
    raise UserError(f"{key}: {problem}{did_you_mean(bare, BUILTINS)} {remedy}")


def _reward_from_function(function: Callable[..., Any], key: str, source: Source | None) -> Reward:
    """Build a reward from a function, a class (which is instantiated), or a callable object."""
    if inspect.isclass(function):
        kind: Any = function
        source = None
        try:
            function = kind()
        except (Exception, SystemExit) as error:  # foreign code
            problem = f"a {kind.__name__} cannot be created without arguments: {describe_error(error)}"
            raise UserError(f"{key}: {problem}") from error
        if not callable(function):
            raise UserError(f"{key}: objects of {kind.__name__} cannot be called; give the class a __call__.")
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    parameters = parameters_of(function, name, key)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return Reward(name, function, parameters, "async")
    is_builtin = source is not None and source[0] == BUILTIN and not getattr(function, "stateful", False)
    if source is not None and (inspect.isfunction(function) or is_builtin) and ENVIRONMENTS not in parameters.named:
        return Reward(name, function, parameters, "worker", source)
    return Reward(name, function, parameters)


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
