"""One reward: its name, its function, and where it runs."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from upweight.errors import UserError, did_you_mean
from upweight.rewards.answers import Failure, Outcome
from upweight.rewards.call import RewardCall, Takes, plain_state
from upweight.rewards.worker import Source

Attempts = list[tuple[tuple[int, int], Outcome]]  # where in the call, and what came of it


@dataclass(frozen=True)
class Reward:
    """A reward function and how it is run: in a worker process, here, or on the event loop here."""

    name: str
    function: Callable[..., Any]
    takes: Takes
    runs: Literal["worker", "here", "async"] = "here"
    source: Source | None = None  # where a worker process finds the function
    is_limited: bool = True  # a model's forward is not a foreign function that may hang

    def job(self, call: RewardCall) -> bytes:
        """A call as a worker process reads it."""
        arguments = self.takes.arguments(replace(call, trainer_state=plain_state(call.trainer_state)))
        try:
            return pickle.dumps((arguments, self.takes.logs, self.name, len(call)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            wrong = ", ".join(name for name, value in arguments.items() if not _travels(value))
            raise UserError(
                f"reward '{self.name}' runs in a worker process, and {wrong} cannot be sent there ({error}); remove "
                "the column, or give the reward as a callable object, which stays in the main process."
            ) from error


def _travels(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def unique_names(rewards: Sequence[Reward]) -> list[Reward]:
    """The same rewards; where two share a name the later one gets a number."""
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
    """A UserError that names every parameter that no column of the data fills."""
    columns = list(columns)
    wrong = [
        f"reward '{reward.name}' needs the column '{name}', which the data does not have.{did_you_mean(name, columns)}"
        for reward in rewards
        for name in reward.takes.lacking(columns)
    ]
    if wrong:
        shown = ", ".join(columns) or "none"
        raise UserError("\n".join([*wrong, f"Columns: {shown}. Give the parameter a default, or make the column."]))


def attempts_of(attempt: Callable[[RewardCall, float], Outcome], call: RewardCall, limit: float) -> Attempts:
    """Call a reward; after a failure again, group by group, so that one bad completion costs its group alone.

    After a time-out the groups share the limit once more, so a call costs twice the limit at most.
    """
    first = attempt(call, limit)
    groups = call.groups()
    if not isinstance(first, Failure) or first.kind == "stuck" or (len(groups) == 1 and first.kind != "died"):
        return [((0, len(call)), first)]
    limit = limit / len(groups) if first.kind == "timed out" else limit
    again: Attempts = [((start, stop), attempt(call.part(start, stop), limit)) for start, stop in groups]
    if first.kind == "timed out" and all(isinstance(one, Failure) and one.kind == "timed out" for _, one in again):
        return [((0, len(call)), first)]  # the first names the limit that the user set
    return again
