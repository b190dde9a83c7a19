"""Scores completions with all rewards of a run; a failing or hanging reward does not stop it."""

import itertools
import json
import math
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from upweight.errors import UserError
from upweight.event_loop import EventLoop, settle
from upweight.log import logger
from upweight.rewards.invoke import AS_TEXT, IN_MESSAGES, RewardFailure, RewardValues
from upweight.rewards.local import InProcessRunner, start_async
from upweight.rewards.parts import PartRewards, fitted
from upweight.rewards.reward import Attempts, Reward, RewardCall, with_retries
from upweight.rewards.workers import WorkerPool
from upweight.types import Credit

MAX_REWARD = 1e18  # whose square is a float32
NOT_FINITE = "it returned NaN, infinity or more than 1e18; return None where a reward does not apply"
WARN_AFTER = 256  # completions without a value after which a warning is logged
# Rollouts and prompts without any reward after which a run stops: it would train on nothing to its end.
MOST_SILENT = (4, 16)
NEVER_APPLIES = "warning: reward '%s' returned None for each of %d completions: it has no effect"
STATE_METHODS = (("state", "restore"), ("state_dict", "load_state_dict"))
Parts = list[tuple[int, "Future[Attempts]"]]  # of a reward's call: where each begins, and its outcomes


@dataclass
class RewardResult:
    """The rewards of a call, NaN if a reward does not apply or failed, and what the functions logged."""

    rewards_SR: Tensor
    credits: dict[tuple[int, int], Credit] = field(default_factory=dict)  # of rewards that are sums over parts
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _RewardStats:
    """Counts of how a reward has performed so far."""

    scored: int = 0
    applied: int = 0
    failed: int = 0
    warned_at: int = 0
    failed_last: bool = False


class Scorer(AbstractContextManager["Scorer"]):
    """Runs rewards where `load.py` says: in worker processes (`workers.py`), in this one (`local.py`), or as async."""

    def __init__(self, rewards: Sequence[Reward], *, workers: int = 1, timeout: float = 120.0) -> None:
        self.rewards = list(rewards)
        self.names = [reward.name for reward in self.rewards]
        self.num_workers, self.timeout = workers, timeout
        self._stats = {name: _RewardStats() for name in self.names}
        self._stats_lock = threading.Lock()
        self._silent: tuple[int, int, int] | None = (0, 0, 0)  # rollouts, prompts, completions; None: a reward applied
        self._state_methods = {r.name: methods for r in self.rewards if (methods := _state_methods(r.function))}
        self._local = InProcessRunner()
        self._loop = EventLoop("rewards")  # lives as long as the rewards, so that HTTP clients they hold stay usable
        self._worker_pool = WorkerPool(workers if any(reward.runs == "worker" for reward in self.rewards) else 0)
        self._local_pool = WorkerPool(1 if any(reward.runs == "here" for reward in self.rewards) else 0)
        self._finalizer = weakref.finalize(self, _close_all, self._worker_pool, self._local_pool, self._loop)

    def __exit__(self, *_: object) -> None:
        self.close()

    def renewed(self) -> "Scorer":
        """Return a scorer of the same rewards with processes of its own, for use after `close`."""
        return Scorer(self.rewards, workers=self.num_workers, timeout=self.timeout)

    def submit(self, call: RewardCall) -> "Future[RewardResult]":
        """Start scoring; calls run in submission order, and several may be pending."""
        return self._start_scoring(call, in_pool=True)

    def score(self, call: RewardCall) -> RewardResult:
        """Score and wait; rewards of this process run in the calling thread."""
        return self._start_scoring(call, in_pool=False).result()

    @property
    def has_state(self) -> bool:
        """Whether any reward has a state to checkpoint."""
        return bool(self._state_methods)

    def state(self) -> dict[str, Any]:
        """Return the states of stateful rewards by name, as JSON values."""
        states = {name: state() for name, (state, _) in self._state_methods.items()}
        for name, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise UserError(f"reward '{name}': its state must be JSON-serializable: {error}.") from error
        return states

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the states that `state` returned."""
        for name, (_, restore) in self._state_methods.items():
            if name in state:
                restore(state[name])

    def close(self) -> None:
        """Stop the worker processes, and log how many completions each reward failed on."""
        if not self._finalizer.alive:
            return
        self._finalizer()
        for name, stats in self._stats.items():
            if stats.failed:
                logger.warning("reward '%s' failed on %d of %d completions", name, stats.failed, stats.scored)
            elif 0 < stats.scored < WARN_AFTER and not stats.applied:
                logger.warning(NEVER_APPLIES, name, stats.scored)

    def _start_scoring(self, call: RewardCall, *, in_pool: bool) -> "Future[RewardResult]":
        result: Future[RewardResult] = Future()
        if not (len(call) and self.rewards):  # if every completion failed, there is nothing to score
            result.set_result(RewardResult(torch.zeros(len(call), len(self.rewards))))
            return result
        parts: list[Parts] = [[] for _ in self.rewards]
        # Those of this process come last, because they may run in this thread.
        for reward, part in sorted(zip(self.rewards, parts, strict=True), key=lambda pair: pair[0].runs == "here"):
            if reward.runs == "worker":
                for start, stop in call.split_for_workers(self.num_workers):
                    part.append((start, self._in_worker(reward, call.part(start, stop))))
            elif reward.runs == "async":
                part.append((0, start_async(self._loop, reward, call, self.timeout)))
            else:
                part.append((0, self._in_process(reward, call, in_pool)))
        futures = [future for part in parts for _, future in part]
        done = itertools.count(1)  # thread-safe

        def part_done(_: object) -> None:
            if next(done) == len(futures):
                settle(result, self._merge_parts, call, parts)

        for future in futures:
            future.add_done_callback(part_done)
        return result

    def _in_worker(self, reward: Reward, call: RewardCall) -> "Future[Attempts]":
        source = reward.source
        assert source is not None
        return self._worker_pool.submit(
            lambda worker: with_retries(
                lambda part, limit: worker.call(source, reward.job(part), limit), call, self.timeout
            )
        )

    def _in_process(self, reward: Reward, call: RewardCall, in_pool: bool) -> "Future[Attempts]":
        if in_pool:
            return self._local_pool.submit(lambda _: self._local.run(reward, call, self.timeout))
        done: Future[Attempts] = Future()
        done.set_result(self._local.run(reward, call, self.timeout))
        return done

    def _merge_parts(self, call: RewardCall, parts: "list[Parts]") -> RewardResult:
        scores = RewardResult(torch.full((len(call), len(self.rewards)), math.nan))
        logged: dict[str, list[float]] = {}
        for number, (reward, of_reward) in enumerate(zip(self.rewards, parts, strict=True)):
            reasons, seconds = Counter[str](), 0.0
            for offset, future in of_reward:
                for (start, stop), outcome in future.result():
                    seconds += outcome.seconds
                    if isinstance(outcome, RewardFailure):
                        reasons[outcome.reason] += stop - start
                        continue
                    if not_finite := self._store_scores(scores, call, number, offset + start, outcome):
                        reasons[NOT_FINITE] += not_finite
                    for name, value in outcome.metrics:
                        logged.setdefault(name, []).append(value)
            scores.metrics[f"rewards/{reward.name}/seconds"] = seconds
            if reasons:
                scores.metrics[f"rewards/{reward.name}/failed"] = float(reasons.total())
            self._note_failures(reward, call, reasons, int((~scores.rewards_SR[:, number].isnan()).sum()))
            if self._stats[reward.name].failed:  # from then on in every log, so that its mean is one over all of them
                scores.metrics[f"rewards/{reward.name}/failed_share"] = reasons.total() / len(call)
        self._refuse_silence(call, bool((~scores.rewards_SR.isnan()).any()))
        scores.metrics |= {name: sum(values) / len(values) for name, values in logged.items()}
        return scores

    def _refuse_silence(self, call: RewardCall, applied: bool) -> None:
        """Count what got no reward, and raise a UserError where that is all that was scored so far."""
        with self._stats_lock:
            if self._silent is None or applied:
                self._silent = None
                return
            rollouts, prompts, completions = self._silent
            self._silent = rollouts + 1, prompts + len(call.groups()), completions + len(call)
            rollouts, prompts, completions = self._silent
        if rollouts >= MOST_SILENT[0] and prompts >= MOST_SILENT[1]:
            names = ", ".join(f"'{name}'" for name in self.names)
            subject = f"reward {names} returned" if len(self.names) == 1 else f"rewards {names} all returned"
            what = f"{subject} None for each of {completions} completions of {prompts} prompts"
            remedy = (
                "Return a number, 0.0 where a completion earns nothing: None is for rows that a reward does not judge, "
                "and `filter` in the dataset's entry leaves such rows out. `upweight rewards CONFIG` tries rewards "
                "without training"
            )
            raise UserError(f"{what}: there is nothing to learn from. {remedy}.")

    def _store_scores(
        self, scores: RewardResult, call: RewardCall, number: int, start: int, answer: RewardValues
    ) -> int:
        """Write one outcome's values and extra columns into `scores`; return how many values were not finite."""
        not_finite = 0
        for position, value in enumerate(answer.values, start):
            if value is None:
                continue
            credit: Credit = []
            if isinstance(value, PartRewards):
                where = f"reward '{self.names[number]}': completion {position}"
                credit = fitted(value, call.completion_ids[position], call.text(position), call.decode, where)
            values = [one for _, one in credit] if isinstance(value, PartRewards) else [value]
            if not all(abs(one) <= MAX_REWARD for one in values):
                not_finite += 1
                continue
            scores.rewards_SR[position, number] = math.fsum(values)
            if isinstance(value, PartRewards):
                scores.credits[position, number] = credit
        for column, logged in answer.extras:
            whole = scores.extras.setdefault(column, [None] * len(scores.rewards_SR))
            whole[start : start + len(logged)] = logged
        return not_finite

    def _note_failures(self, reward: Reward, call: RewardCall, reasons: "Counter[str]", applied: int) -> None:
        """Count failures, warn each time they have doubled, and raise a UserError if every completion failed."""
        name, count, failed = reward.name, len(call), reasons.total()
        all_failed = failed == count
        with self._stats_lock:
            stats = self._stats[name]
            # A single failed group is tolerated if the reward has worked before.
            tolerated = len(call.groups()) == 1 and stats.failed < stats.scored and not stats.failed_last
            was_short = stats.scored < WARN_AFTER
            stats.scored += count
            stats.failed += failed
            stats.applied += applied
            silent = was_short and stats.scored >= WARN_AFTER and not stats.applied and not stats.failed
            stats.failed_last = all_failed
            warns = failed > 0 and stats.failed >= 2 * stats.warned_at
            stats.warned_at = stats.failed if warns else stats.warned_at
        if silent:
            logger.warning(NEVER_APPLIES, name, stats.scored)
        if not failed:
            return
        reason = reasons.most_common(1)[0][0]
        if all_failed and not tolerated:
            hint = " Fix it, or raise trl.reward_timeout." if "took longer than" in reason else ""
            is_text = isinstance(call.completions[0], str)
            if "'list'" in reason or "not list" in reason or (not is_text and "list indices" in reason):
                hint = f" {IN_MESSAGES}."  # it took the list for a text, or for the one message in it
            elif is_text and ("string indices" in reason or "'str' object" in reason):
                hint = f" {AS_TEXT}."
            raise UserError(f"reward '{name}' failed on all {count} completions: {reason}.{hint}")
        if warns:
            logger.warning("warning: reward '%s' failed on %d of %d completions: %s", name, failed, count, reason)


def _state_methods(function: Any) -> list[Any] | None:
    """Return the methods that return and restore a reward's state, if it has both; a model's weights are no state."""
    each = [[getattr(function, name, None) for name in names] for names in STATE_METHODS]
    is_model = isinstance(function, nn.Module)
    return next((methods for methods in each if all(map(callable, methods)) and not is_model), None)


def _close_all(worker_pool: WorkerPool, local_pool: WorkerPool, loop: EventLoop) -> None:
    worker_pool.close()
    local_pool.close()
    loop.close()
