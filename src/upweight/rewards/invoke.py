"""The outcome of calling a reward function: checked values or a failure; a UserError ends the run."""

import math
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from upweight.errors import UserError
from upweight.rewards.parts import FORMS, PartRewards, part_rewards
from upweight.user_modules import describe_error

IN_MESSAGES = "Where the prompt is messages, so is a completion: read completion[0]['content']"
AS_TEXT = (
    "The completion of a prompt that is text is a plain string: read it as it is (where the prompt is messages, it is "
    "a list of messages)"
)
Value = float | None
Function = Callable[..., Any]


@dataclass(frozen=True)
class RewardValues:
    """The values that a call returned, what it logged, and how long it took."""

    values: list[Value | PartRewards]
    extras: list[tuple[str, list[Any]]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class RewardFailure:
    """The reason why a call returned no values; a call that is stuck cannot be retried."""

    kind: Literal["raised", "timed out", "died", "stuck"]
    reason: str
    seconds: float = 0.0


RewardOutcome = RewardValues | RewardFailure


class RewardLogger:
    """Collects what one call logs; a wrong use is recorded and raised when the call is over."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.extras: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []
        self.error: str | None = None

    def log_extra(self, column: str, values: Any) -> None:
        """Log a column of values, one for each completion."""
        listed = _as_plain_value(values)
        if not isinstance(listed, list) or len(listed) != self.count:
            got = f"{len(listed)} values" if isinstance(listed, list) else f"a {type(values).__name__}"
            self.error = f"reward '{self.name}': log_extra('{column}') needs {self.count} values, got {got}."
            return
        self.extras.append((str(column), listed))

    def log_metric(self, name: str, value: Any) -> None:
        """Log a number as a metric."""
        number = _as_float(value)
        if number is None:
            self.error = f"reward '{self.name}': log_metric('{name}') needs a number, got a {type(value).__name__}."
            return
        self.metrics.append((str(name), number))

    def functions(self, names: Iterable[str]) -> dict[str, Callable[..., None]]:
        return {name: getattr(self, name) for name in names}

    def answer(self, returned: Any, seconds: float) -> RewardValues:
        """Check what a call returned, and return it with what the call logged."""
        values = checked_values(returned, self.name, self.count)
        if self.error is not None:
            raise UserError(self.error)
        return RewardValues(values, self.extras, self.metrics, seconds)


def invoke(function: Function, arguments: dict[str, Any], logs: Iterable[str], name: str, count: int) -> RewardOutcome:
    """Call a reward function in this thread."""
    logged, start = RewardLogger(name, count), time.perf_counter()
    try:
        returned = function(**arguments, **logged.functions(logs))
    except (Exception, SystemExit, CancelledError) as error:  # foreign code
        return failed(error, time.perf_counter() - start)
    return logged.answer(returned, time.perf_counter() - start)


def failed(error: BaseException, seconds: float) -> RewardFailure:
    """Convert an exception of a reward function to an outcome; a UserError is raised again."""
    if isinstance(error, UserError):
        raise error
    reason = describe_error(error)
    if "signal only works in main thread" in str(error):
        reason += "; put the function into a separate file, so that it runs in the main thread of a worker process"
    return RewardFailure("raised", reason, seconds)


def checked_values(returned: Any, name: str, count: int) -> list[Value | PartRewards]:
    """Return the values of a reward as numbers, Nones (NaN is kept) and parts; raise a UserError about others."""
    start = f"reward '{name}' must return a list of {count} numbers (None where it does not apply), one for each "
    listed = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(listed, list | tuple):
        hint = ": does it end without a `return`?" if returned is None else "."
        hint = ": await what it calls, and declare it `async def`." if hasattr(returned, "__await__") else hint
        raise UserError(f"{start}completion, but returned a {type(returned).__name__}{hint}")
    if len(listed) != count:
        raise UserError(f"{start}completion, but returned {len(listed)} of them.")
    values: list[Value | PartRewards] = []
    for position, item in enumerate(listed):
        number = _as_float(item)
        values.append(part_rewards(item, _as_float) if number is None else number)
        if item is not None and values[-1] is None:
            forms = f". For parts of a completion give {FORMS}" if isinstance(item, list | tuple | dict) else ""
            raise UserError(f"{start}completion, but value {position} is a {type(item).__name__}: {item!r:.80}{forms}")
    return values


def _as_float(value: Any) -> float | None:
    """Convert a number of any library to a float; None if it is not a number."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _as_plain_value(value: Any) -> Any:
    """Convert a value to plain types that can be pickled and written as JSON."""
    if hasattr(value, "tolist"):
        return _as_plain_value(value.tolist())
    if isinstance(value, list | tuple):
        return [_as_plain_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _as_plain_value(item) for key, item in value.items()}
    return value if isinstance(value, int | float | str | None) else str(value)
