"""Completions in, a column of rewards for each function out, whatever the functions do."""

import json
import math
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from upweight.errors import UserError
from upweight.event_loop import EventLoop
from upweight.log import logger
from upweight.rewards.answers import IN_MESSAGES, Answer, Broken, Failure
from upweight.rewards.call import RewardCall
from upweight.rewards.local import Local, start_async
from upweight.rewards.reward import Attempts, Reward, attempts_of
from upweight.rewards.workers import Lanes, Worker

NOT_FINITE = "it returned NaN or infinity; return None where a reward does not apply"
SILENT = 256  # completions without a value after which a reward is told of
NEVER_APPLIES = "warning: reward '%s' returned None for each of %d completions: it applies to none and teaches nothing"
STATE_METHODS = (("state", "restore"), ("state_dict", "load_state_dict"))


@dataclass
class Scores:
    """The rewards of a call, NaN where one does not apply or failed, and what the functions logged."""

    rewards_SR: Tensor
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _History:
    """How a reward has done so far."""

    scored: int = 0
    applied: int = 0
    failed: int = 0
    warned_at: int = 0
    failed_last: bool = False


class Scorer:
    """Runs rewards: plain functions in worker processes, objects with state here, async functions together."""

    def __init__(self, rewards: Sequence[Reward], *, workers: int = 1, timeout: float = 120.0) -> None:
        self.rewards = list(rewards)
        self.names = [reward.name for reward in self.rewards]
        self.num_workers, self.timeout = workers, timeout
        self._history = {name: _History() for name in self.names}
        self._merging = threading.Lock()
        self._local = Local()
        self._loop = EventLoop("rewards")  # lives as long as the rewards, so that clients they keep stay usable
        self._lanes = Lanes(workers if any(reward.runs == "worker" for reward in self.rewards) else 0)
        self._local_lane = Lanes(1 if any(reward.runs == "here" for reward in self.rewards) else 0)
        self._ending = weakref.finalize(self, _end, self._lanes, self._local_lane, self._loop)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, call: RewardCall) -> "Future[Scores]":
        """Start scoring; calls are taken in the order they come, and several may be under way."""
        return self._start(call, in_lane=True)

    def score(self, call: RewardCall) -> Scores:
        """Score now; rewards that stay in this process run in the thread that calls."""
        return self._start(call, in_lane=False).result()

    @property
    def has_state(self) -> bool:
        """Whether any reward has one to keep."""
        return any(_state_method(reward, 0) is not None for reward in self.rewards)

    def state(self) -> dict[str, Any]:
        """What rewards with a state say of it, by name, fit for JSON."""
        states = {}
        for reward in self.rewards:
            method = _state_method(reward, 0)
            if method is not None:
                states[reward.name] = method()
                try:
                    json.dumps(states[reward.name])
                except (TypeError, ValueError) as error:
                    raise UserError(f"reward '{reward.name}': its state must be fit for JSON: {error}.") from error
        return states

    def restore(self, state: dict[str, Any]) -> None:
        """Give rewards the states that `state` returned."""
        for reward in self.rewards:
            method = _state_method(reward, 1)
            if method is not None and reward.name in state:
                method(state[reward.name])

    def close(self) -> None:
        """End the worker processes, and say how many completions each reward failed on."""
        if not self._ending.alive:
            return
        self._ending()
        for name, history in self._history.items():
            if history.failed:
                logger.warning("reward '%s' failed on %d of %d completions", name, history.failed, history.scored)
            elif 0 < history.scored < SILENT and not history.applied:
                logger.warning(NEVER_APPLIES, name, history.scored)

    def _start(self, call: RewardCall, *, in_lane: bool) -> "Future[Scores]":
        result: Future[Scores] = Future()
        if not len(call):  # every completion failed: there is nothing to ask
            result.set_result(Scores(torch.zeros(0, len(self.rewards))))
            return result
        parts: list[list[tuple[int, Future[Attempts]]]] = [[] for _ in self.rewards]
        here = [number for number, reward in enumerate(self.rewards) if reward.runs == "here"]
        for number, reward in enumerate(self.rewards):
            if reward.runs == "worker":
                for start, stop in call.shares(self.num_workers):
                    parts[number].append((start, self._in_worker(reward, call.part(start, stop))))
            elif reward.runs == "async":
                parts[number].append((0, start_async(self._loop, reward, call, self.timeout)))
        for number in here:
            parts[number].append((0, self._here(self.rewards[number], call, in_lane)))
        self._when_done(call, parts, result)
        return result

    def _in_worker(self, reward: Reward, call: RewardCall) -> "Future[Attempts]":
        source = reward.source
        assert source is not None

        def work(worker: Worker) -> Attempts:
            return attempts_of(lambda part, limit: worker.call(source, reward.job(part), limit), call, self.timeout)

        return self._lanes.put(work)

    def _here(self, reward: Reward, call: RewardCall, in_lane: bool) -> "Future[Attempts]":
        if in_lane:
            return self._local_lane.put(lambda _: self._local.run(reward, call, self.timeout))
        done: Future[Attempts] = Future()
        done.set_result(self._local.run(reward, call, self.timeout))
        return done

    def _when_done(
        self, call: RewardCall, parts: list[list[tuple[int, "Future[Attempts]"]]], result: "Future[Scores]"
    ) -> None:
        """Set the result once every part is there."""
        futures = [future for of_reward in parts for _, future in of_reward]
        left, lock = [len(futures) + 1], threading.Lock()

        def one_less(_: object = None) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                result.set_result(self._merged(call, parts))
            except BaseException as error:  # handed to whoever asked for the result
                result.set_exception(error)

        for future in futures:
            future.add_done_callback(one_less)
        one_less()

    def _merged(self, call: RewardCall, parts: list[list[tuple[int, "Future[Attempts]"]]]) -> Scores:
        scores = Scores(torch.full((len(call), len(self.rewards)), math.nan))
        logged: dict[str, list[float]] = {}
        for number, (reward, of_reward) in enumerate(zip(self.rewards, parts, strict=True)):
            reasons: Counter[str] = Counter()
            seconds = 0.0
            for offset, future in of_reward:
                for (start, stop), outcome in future.result():
                    if isinstance(outcome, Broken):
                        raise UserError(outcome.message)
                    seconds += outcome.seconds
                    if isinstance(outcome, Failure):
                        reasons[outcome.reason] += stop - start
                        continue
                    not_finite = _put(scores, number, offset + start, outcome)
                    if not_finite:
                        reasons[NOT_FINITE] += not_finite
                    for name, value in outcome.metrics:
                        logged.setdefault(name, []).append(value)
            scores.metrics[f"rewards/{reward.name}/seconds"] = seconds
            if reasons:
                scores.metrics[f"rewards/{reward.name}/failed"] = float(reasons.total())
            applied = int((~scores.rewards_SR[:, number].isnan()).sum())
            self._note(reward, call, reasons, applied)
        scores.metrics |= {name: sum(values) / len(values) for name, values in logged.items()}
        return scores

    def _note(self, reward: Reward, call: RewardCall, reasons: "Counter[str]", applied: int) -> None:
        """Count failures; warn of them each time they have doubled, and stop when nothing is left."""
        count, failed = len(call), reasons.total()
        with self._merging:
            history = self._history[reward.name]
            all_failed = bool(count) and failed == count
            # One group alone can be bad luck where the reward has worked before.
            forgiven = len(call.groups()) == 1 and history.failed < history.scored and not history.failed_last
            was_short = history.scored < SILENT
            history.scored += count
            history.failed += failed
            history.applied += applied
            silent = was_short and history.scored >= SILENT and not history.applied and not history.failed
            history.failed_last = all_failed
            warns = failed > 0 and history.failed >= 2 * history.warned_at
            if warns:
                history.warned_at = history.failed
        if silent:
            logger.warning(NEVER_APPLIES, reward.name, history.scored)
        if not failed:
            return
        reason = reasons.most_common(1)[0][0]
        if all_failed and not forgiven:
            hint = " Mend it, or raise trl.reward_timeout." if "took longer than" in reason else ""
            if "'list'" in reason or "not list" in reason:  # methods of a text, or functions on one
                hint = f" {IN_MESSAGES}."
            raise UserError(f"reward '{reward.name}' failed on all {count} completions: {reason}.{hint}")
        if warns:
            logger.warning(
                "warning: reward '%s' failed on %d of %d completions: %s", reward.name, failed, count, reason
            )


def _put(scores: Scores, number: int, start: int, answer: Answer) -> int:
    """Write one answer's values and extra columns where they belong; how many values were not finite."""
    wrong = 0
    for position, value in enumerate(answer.values, start):
        if value is not None and not math.isfinite(value):
            wrong += 1
        elif value is not None:
            scores.rewards_SR[position, number] = value
    for column, values in answer.extras:
        whole = scores.extras.setdefault(column, [None] * len(scores.rewards_SR))
        whole[start : start + len(values)] = values
    return wrong


def _state_method(reward: Reward, which: int) -> Any:
    """The method that gives (0) or takes (1) a reward's state, where it has both."""
    if isinstance(reward.function, nn.Module):
        return None
    for names in STATE_METHODS:
        methods = [getattr(reward.function, name, None) for name in names]
        if all(callable(method) for method in methods):
            return methods[which]
    return None


def _end(lanes: Lanes, local_lane: Lanes, loop: EventLoop) -> None:
    lanes.close()
    local_lane.close()
    loop.close()
