"""A reward with an adaptive weight, and one that only prints completions."""

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

from pydantic import NonNegativeInt, PositiveInt, validate_call

from upweight.errors import UserError
from upweight.rewards.builtin.spec import BUILTINS, builtin, builtin_reward
from upweight.rewards.builtin.text import ScoreList, texts_of
from upweight.rewards.invoke import checked_values
from upweight.rewards.parts import PartRewards


@builtin
class DebugReward:
    """Prints the first completions of each call to stderr and scores every one 1."""

    show: NonNegativeInt = 2
    width: PositiveInt = 200
    __name__ = "debug"

    def __call__(self, completions: list[Any], **_: Any) -> ScoreList:
        for row, text in enumerate(texts_of(completions)[: self.show]):
            more = "..." if len(text) > self.width else ""
            # Control characters are escaped, so that a completion cannot control the terminal.
            shown = "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text[: self.width])
            print(f"completion {row}: {shown}{more}", file=sys.stderr, flush=True)
        return [1.0] * len(completions)


class AdaptiveReward:
    """Multiplies another reward by a weight that rises while few completions succeed and falls while most do."""

    stateful = True
    __name__ = "adaptive"

    @validate_call
    def __init__(
        self,
        reward: str | Callable[..., Any],
        weight: float = 1.0,
        *,
        low: float = 0.3,
        high: float = 0.8,
        raise_by: float = 1.2,
        lower_by: float = 0.9,
        minimum: float = 0.1,
        maximum: float = 10.0,
        success: float = 0.5,
    ) -> None:
        """`raise_by` and `lower_by` are the factors of the weight after a step with few or with many successes."""
        self.reward = _build_reward(reward)
        self.__name__ = f"adaptive_{getattr(self.reward, '__name__', type(self.reward).__name__)}"
        if not 0 <= low < high <= 1:
            raise UserError(f"Reward 'adaptive': low {low} and high {high} must be shares with low below high.")
        if not (raise_by >= 1 >= lower_by > 0 and math.isfinite(raise_by)):
            raise UserError(f"Reward 'adaptive': raise_by {raise_by} is at least 1, lower_by {lower_by} in (0, 1].")
        if not 0 < minimum <= weight <= maximum or not math.isfinite(maximum):
            raise UserError(f"Reward 'adaptive': weight {weight} must lie from minimum {minimum} to maximum {maximum}.")
        self.weight = float(weight)
        self.low, self.high, self.raise_by, self.lower_by = low, high, raise_by, lower_by
        self.minimum, self.maximum, self.success = minimum, maximum, success
        self._step: int | None = None
        self._succeeded = self._scored = 0

    def __call__(self, completions: list[Any], **columns: Any) -> ScoreList:
        step = getattr(columns.get("trainer_state"), "global_step", None)
        # Within a step the weight stands still, however many calls score its groups.
        if step is not None and step != self._step:
            self._end_step()
            self._step = step
        scores = checked_values(self.reward(completions, **columns), self.__name__, len(completions))
        weighted: list[Any] = [
            score.times(self.weight)
            if isinstance(score, PartRewards)
            else None
            if score is None
            else score * self.weight
            for score in scores
        ]
        totals = [score.total if isinstance(score, PartRewards) else score for score in scores]
        known = [total for total in totals if total is not None and not math.isnan(total)]
        self._scored += len(known)
        self._succeeded += sum(score >= self.success for score in known)
        if step is None:
            self._end_step()
        if (log_metric := columns.get("log_metric")) is not None:
            log_metric(f"{self.__name__}/weight", self.weight)
        return weighted

    def _end_step(self) -> None:
        """Move the weight: up where the share of successes is below `low`, down above `high`, within its bounds."""
        share = self._succeeded / self._scored if self._scored else self.low
        if share < self.low:
            self.weight = min(self.weight * self.raise_by, self.maximum)
        elif share > self.high:
            self.weight = max(self.weight * self.lower_by, self.minimum)
        self._succeeded = self._scored = 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, including the wrapped reward's."""
        inner = self.reward.state() if getattr(self.reward, "stateful", False) else None
        counts = {"step": self._step, "succeeded": self._succeeded, "scored": self._scored}
        return {"weight": self.weight, **counts, "inner": inner}

    def restore(self, state: dict[str, Any]) -> None:
        self.weight, self._step = state["weight"], state["step"]
        self._succeeded, self._scored = state["succeeded"], state["scored"]
        if state["inner"] is not None:
            self.reward.restore(state["inner"])


BUILTINS["adaptive"] = AdaptiveReward


def _build_reward(reward: str | Callable[..., Any]) -> Any:
    if callable(reward):
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
            raise UserError("Reward 'adaptive' wraps plain functions only; this one is async.")
        return reward
    built = builtin_reward(reward)
    if built is None:
        example = "`mine = AdaptiveReward(function)` (from upweight.rewards.builtin.adaptive)"
        remedy = f"To wrap your function, put {example} into your file and name 'file.mine'."
        raise UserError(f"Reward 'adaptive': reward={reward!r} names no built-in reward. {remedy}")
    return built
