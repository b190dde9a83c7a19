"""What comes back from a call of a reward function: values that keep the contract, or why there are none."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from upweight.errors import UserError
from upweight.user_modules import described

IN_MESSAGES = (
    "Where the prompt is messages a completion is [{'role': 'assistant', 'content': ...}]: "
    "read completion[0]['content']"
)
Value = float | None


@dataclass(frozen=True)
class Answer:
    """The values of a call, what it logged, and how long it took."""

    values: list[Value]
    extras: list[tuple[str, list[Any]]] = field(default_factory=list)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Failure:
    """Why a call gave no values. A call that is stuck still occupies its function, so it cannot be tried again."""

    kind: Literal["raised", "timed out", "died", "stuck"]
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Broken:
    """A call that ends the run: the function breaks the contract, or says itself what the user has to mend."""

    message: str


Outcome = Answer | Failure | Broken


class Logged:
    """Collects what one call logs; wrong use of it is noted, to be raised when the call is over."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.extras: list[tuple[str, list[Any]]] = []
        self.metrics: list[tuple[str, float]] = []
        self.wrong: str | None = None

    def log_extra(self, column: str, values: Any) -> None:
        """Show a column of values, one for each completion, beside the completions."""
        listed = _plain(values)
        if not isinstance(listed, list) or len(listed) != self.count:
            got = f"{len(listed)} values" if isinstance(listed, list) else f"a {type(values).__name__}"
            self.wrong = f"reward '{self.name}': log_extra('{column}') needs {self.count} values, got {got}."
            return
        self.extras.append((str(column), listed))

    def log_metric(self, name: str, value: Any) -> None:
        """Log a number under a name of its own."""
        number = _number(value)
        if number is None:
            self.wrong = f"reward '{self.name}': log_metric('{name}') needs a number, got a {type(value).__name__}."
            return
        self.metrics.append((str(name), number))

    def functions(self, names: Iterable[str]) -> dict[str, Callable[..., None]]:
        """The logging functions of these names."""
        return {name: getattr(self, name) for name in names}

    def answer(self, returned: Any, seconds: float) -> Answer | Broken:
        """What a call returned, checked, with what it logged."""
        values = checked_values(returned, self.name, self.count)
        if isinstance(values, Broken):
            return values
        if self.wrong is not None:
            return Broken(self.wrong)
        return Answer(values, self.extras, self.metrics, seconds)


def invoke(
    function: Callable[..., Any], arguments: dict[str, Any], logs: Iterable[str], name: str, count: int
) -> Outcome:
    """Call a function here and now."""
    logged, start = Logged(name, count), time.perf_counter()
    try:
        returned = function(**arguments, **logged.functions(logs))
    except (Exception, SystemExit) as error:  # foreign code
        return failed(error, time.perf_counter() - start)
    return logged.answer(returned, time.perf_counter() - start)


def failed(error: BaseException, seconds: float) -> Failure | Broken:
    """An error out of a reward function, in words."""
    if isinstance(error, UserError):
        return Broken(str(error))
    hint = ""
    if "signal only works in main thread" in str(error):
        hint = "; put the function into a file of its own, so that it runs in the main thread of a worker process"
    return Failure("raised", f"{described(error)}{hint}", seconds)


def checked_values(returned: Any, name: str, count: int) -> list[Value] | Broken:
    """The values a reward returned as plain numbers and Nones, NaN kept; or how they break the contract."""
    expected = f"reward '{name}' must return a list of {count} numbers (None where it does not apply), one for each "
    listed = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(listed, list | tuple):
        hint = ": await what it calls, and declare it `async def`" if hasattr(returned, "__await__") else ""
        return Broken(f"{expected}completion, but returned a {type(returned).__name__}{hint}.")
    if len(listed) != count:
        return Broken(f"{expected}completion, but returned {len(listed)} of them.")
    values: list[Value] = []
    for position, given in enumerate(listed):
        number = None if given is None else _number(given)
        if given is not None and number is None:
            return Broken(f"{expected}completion, but value {position} is a {type(given).__name__}: {given!r:.80}")
        values.append(number)
    return values


def _number(value: Any) -> float | None:
    """A number of whatever library as a float; None where it is none."""
    if not isinstance(value, str | bytes) and hasattr(value, "item") and getattr(value, "size", 1) is not None:
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _plain(value: Any) -> Any:
    """A value that any process can read and JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
