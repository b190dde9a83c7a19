"""A reward: its name, its function, and where it runs."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from upweight.errors import UserError, did_you_mean
from upweight.rewards.answers import RewardFailure, RewardOutcome
from upweight.rewards.call import RewardCall, RewardParameters, plain_state
from upweight.rewards.worker import Source

Attempts = list[tuple[tuple[int, int], RewardOutcome]]  # (start, stop) within the call, outcome


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
            raise UserError(
                f"reward '{self.name}' runs in a worker process, and {unpicklable} cannot be sent there ({error}); "
                "remove the column, or pass the reward as a callable object, which runs in the main process."
            ) from error


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def unique_names(rewards: Sequence[Reward]) -> list[Reward]:
    """Return the rewards with unique names: a repeated name gets a number."""
    taken: set[str] = set()
    renamed = []
    for reward in rewards:
        name, number = reward.name, 2
        while name in taken:
            name, number = f"{reward.name}_{number}", number + 1
        taken.add(name)
        renamed.append(replace(reward, name=name))
    return renamed


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
        raise UserError("\n".join([*wrong, f"Columns: {shown}. Give the parameter a default, or add the column."]))


def call_with_retries(
    attempt: Callable[[RewardCall, float], RewardOutcome], call: RewardCall, limit: float
) -> Attempts:
    """Call a reward; after a failure retry group by group, so that one bad completion affects only its group.

    After a timeout the groups share one more limit, so a call takes at most twice the limit.
    """
    first = attempt(call, limit)
    groups = call.groups()
    if not isinstance(first, RewardFailure) or first.kind == "stuck" or (len(groups) == 1 and first.kind != "died"):
        return [((0, len(call)), first)]
    limit = limit / len(groups) if first.kind == "timed out" else limit
    retries: Attempts = [((start, stop), attempt(call.part(start, stop), limit)) for start, stop in groups]
    if first.kind == "timed out" and all(
        isinstance(retry, RewardFailure) and retry.kind == "timed out" for _, retry in retries
    ):
        return [((0, len(call)), first)]  # the first names the limit that the user set
    return retries
