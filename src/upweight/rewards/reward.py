"""A reward: its name, its function and where it runs, the parameters it takes, and the call that fills them."""

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from types import SimpleNamespace
from typing import Any, Literal

from upweight.errors import UserError, did_you_mean
from upweight.rewards.invoke import RewardFailure, RewardOutcome
from upweight.rewards.workers import Source

LOG_ARGUMENTS = ("log_extra", "log_metric")
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state")
ENVIRONMENTS = "environments"  # parameter of reward functions that read the objects of episodes
MAX_LOG_HISTORY = 100  # log entries of the trainer's state that are sent to worker processes
Attempts = list[tuple[tuple[int, int], RewardOutcome]]  # (start, stop) within the call, outcome


@dataclass(frozen=True)
class RewardCall:
    """The completions of some whole groups with their prompts and columns; groups are consecutive."""

    prompts: list[Any]  # text or messages, as in the row, one for each completion
    completions: list[Any]  # text, or a list of one assistant message if the prompt is messages
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]  # every other dataset column, one value for each completion
    group_S: list[int]
    trainer_state: Any = None
    decode: Callable[[list[int]], str] | None = None  # tokens of a completion -> its text
    environments: list[Any] = field(default_factory=list)  # the user's object of each episode, None where there is none

    def __len__(self) -> int:
        return len(self.completions)

    def part(self, start: int, stop: int) -> "RewardCall":
        """Return the call for the completions from `start` up to `stop`."""
        names = ("prompts", "completions", "completion_ids", "group_S", "environments")
        lists = {name: getattr(self, name)[start:stop] for name in names}
        return replace(self, **lists, columns={name: values[start:stop] for name, values in self.columns.items()})

    def text(self, position: int) -> str | None:
        """Return the text of a completion; None for a conversation of several messages."""
        content = self.completions[position]
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
            content = content[0].get("content")
        return content if isinstance(content, str) else None

    def groups(self) -> list[tuple[int, int]]:
        """Return the start and stop of each group."""
        sizes = (len(list(members)) for _, members in groupby(self.group_S))
        return list(pairwise(accumulate(sizes, initial=0)))

    def split_for_workers(self, count: int) -> list[tuple[int, int]]:
        """Split into at most `count` shards of whole groups, about equal in groups; return their starts and stops."""
        groups = self.groups()
        count = min(count, len(groups))
        edges = [len(groups) * number // count for number in range(count + 1)] if count else []
        return [(groups[a][0], groups[b - 1][1]) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class RewardParameters:
    """The keyword parameters of a reward function."""

    named: tuple[str, ...]
    required: tuple[str, ...]
    everything: bool  # has **kwargs

    @property
    def logs(self) -> tuple[str, ...]:
        """The logging functions that the reward function takes."""
        return tuple(name for name in LOG_ARGUMENTS if self.everything or name in self.named)

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """Return the keyword arguments of a call for this function, without the logging functions."""
        available = call.columns | {name: getattr(call, name) for name in STANDARD_ARGUMENTS}
        chosen = {name: value for name, value in available.items() if self.everything or name in self.named}
        if ENVIRONMENTS in self.named and ENVIRONMENTS not in available:
            chosen[ENVIRONMENTS] = call.environments
        for name in set(self.named) - {*available, ENVIRONMENTS}:
            if (column := _singular_column(name, call.columns)) is not None:
                chosen[name] = call.columns[column]
        return {name: value for name, value in chosen.items() if name not in LOG_ARGUMENTS}

    def missing_in(self, columns: Iterable[str]) -> list[str]:
        """Return the required parameters that these columns do not fill."""
        columns = {*columns, *STANDARD_ARGUMENTS, *LOG_ARGUMENTS}
        return [name for name in self.required if name not in columns and _singular_column(name, columns) is None]


def parameters_of(function: Callable[..., Any], name: str, key: str) -> RewardParameters:
    """Return the parameters of a reward function; raise a UserError if it cannot be called as one."""
    example = f"write it as `def {name if name.isidentifier() else 'reward'}(completions, **kwargs)`"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: the parameters of reward '{name}' cannot be read ({error}); {example}.") from error
    shown = ", ".join(str(parameter) for parameter in parameters)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        remedy = f"remove the '/' after '{positional[-1]}'"
        raise UserError(f"{key}: reward '{name}' takes ({shown}), but rewards are called by name; {remedy}.")
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = tuple(p.name for p in by_name)
    if not everything and not {"completions", "completion_ids"} & set(named):
        raise UserError(f"{key}: reward '{name}' takes ({shown}) and so never gets the completions; {example}.")
    return RewardParameters(named, tuple(p.name for p in by_name if p.default is p.empty), everything)


def plain_state(state: Any) -> Any:
    """Return the trainer's state as a namespace of plain values, which a process without transformers can read."""
    if state is None:
        return None
    plain = bool | int | float | str | list | dict | None
    values = {name: value for name, value in vars(state).items() if isinstance(value, plain)}
    if isinstance(values.get("log_history"), list):
        values["log_history"] = values["log_history"][-MAX_LOG_HISTORY:]
    return SimpleNamespace(**values)


def _singular_column(name: str, columns: Iterable[str]) -> str | None:
    """Return the column whose name is the singular of a parameter's name, or None."""
    endings: Sequence[tuple[str, str]] = (("s", ""), ("es", ""), ("ies", "y"))
    singulars = {name.removesuffix(ending) + other for ending, other in endings if name.endswith(ending)}
    return next((column for column in columns if column in singulars), None)


@dataclass(frozen=True)
class Reward:
    """A reward function and where it runs: in a worker process, in this process, or on its event loop."""

    name: str
    function: Callable[..., Any]
    takes: RewardParameters
    runs: Literal["worker", "here", "async"] = "here"
    source: Source | None = None  # from where a worker process imports the function
    has_timeout: bool = True  # False for models, whose forward cannot hang as a user's function can

    def job(self, call: RewardCall) -> bytes:
        """Pickle a call for a worker process."""
        arguments = self.takes.arguments(replace(call, trainer_state=plain_state(call.trainer_state)))
        try:
            return pickle.dumps((arguments, self.takes.logs, self.name, len(call)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            unpicklable = ", ".join(name for name, value in arguments.items() if not _is_picklable(value))
            problem = f"runs in a worker process, and {unpicklable} cannot be sent there ({error})"
            remedy = "remove the column, or pass the reward as a callable object, which runs in the main process"
            raise UserError(f"reward '{self.name}' {problem}; {remedy}.") from error


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def unique_names(rewards: Sequence[Reward]) -> list[Reward]:
    """Return the rewards with unique names: a repeated name gets a number."""
    renamed: dict[str, Reward] = {}
    for reward in rewards:
        name, number = reward.name, 2
        while name in renamed:
            name, number = f"{reward.name}_{number}", number + 1
        renamed[name] = replace(reward, name=name)
    return list(renamed.values())


def check_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> None:
    """Raise a UserError that names every required parameter that no column of the data fills."""
    columns = list(columns)
    wrong = [
        f"reward '{reward.name}' needs the column '{name}', which the data does not have.{did_you_mean(name, columns)}"
        for reward in rewards
        for name in reward.takes.missing_in(columns)
    ]
    if wrong:
        shown = ", ".join(columns) or "none"
        problems = "\n".join(wrong)
        raise UserError(f"{problems} Columns: {shown}. Give the parameter a default, or add the column.")


def with_retries(attempt: Callable[[RewardCall, float], RewardOutcome], call: RewardCall, limit: float) -> Attempts:
    """Call a reward, for up to twice the limit; after a failure retry group by group, so that only bad groups fail."""
    first = attempt(call, limit)
    groups = call.groups()
    if not isinstance(first, RewardFailure) or first.kind == "stuck" or (len(groups) == 1 and first.kind != "died"):
        return [((0, len(call)), first)]
    limit = limit / len(groups) if first.kind == "timed out" else limit
    retries: Attempts = [((start, stop), attempt(call.part(start, stop), limit)) for start, stop in groups]
    kinds = {retry.kind if isinstance(retry, RewardFailure) else None for _, retry in retries}
    if first.kind == "timed out" and kinds == {"timed out"}:
        return [((0, len(call)), first)]  # the first names the limit that the user set
    return retries
