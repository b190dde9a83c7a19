"""Tries rewards without training: their scores, how well they separate completions, and remarks about problems."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from torch import nn

from upweight.errors import UserError
from upweight.log import counted
from upweight.rewards.builtin.text import texts_of
from upweight.rewards.invoke import IN_MESSAGES, RewardValues, Value
from upweight.rewards.local import InProcessRunner
from upweight.rewards.parts import PartRewards
from upweight.rewards.reward import Reward, RewardCall
from upweight.rewards.scorer import MAX_REWARD, Scorer

SLOW_SECONDS = 10.0  # seconds of one call above which a remark is made
ROUNDING = 1e-6  # of float32, relative
SPREAD_RATIO = 20.0  # ratio of two rewards' spreads above which a remark is made


@dataclass(frozen=True)
class Trial:
    """The scores and failures of one reward."""

    name: str
    scores: list[Value]  # None: does not apply, or failed
    groups: list[tuple[int, int]]  # where each prompt's completions start and stop
    failed: int = 0
    failure: str | None = None  # the reason, if it failed on every completion
    seconds: float = 0.0
    on_text: list[Value] | None = None  # scores of plain text instead of messages, if that was tried

    @property
    def known(self) -> list[float]:
        """The scores that are numbers."""
        return [score for score in self.scores if score is not None]

    @property
    def spread(self) -> float | None:
        """Standard deviation within groups, averaged over groups, on which advantages depend."""
        members = [[score for score in self.scores[a:b] if score is not None] for a, b in self.groups]
        spreads = [stdev(group) for group in members if len(group) > 1]
        return fmean(spreads) if spreads else None

    def summary(self) -> dict[str, Any]:
        """Return the figures for a table or a JSON object."""
        known = self.known
        return {
            "name": self.name,
            "mean": fmean(known) if known else None,
            "lowest": min(known, default=None),
            "highest": max(known, default=None),
            "spread_within_groups": self.spread,
            "does_not_apply": len(self.scores) - len(known) - self.failed,
            "failed": self.failed,
            "completions": len(self.scores),
            "seconds": self.seconds,
        }

    def extremes(self, count: int) -> tuple[list[int], list[int]]:
        """Return the indices of the best completions and of the worst; none if all scores are equal."""
        scored = [(score, number) for number, score in enumerate(self.scores) if score is not None]
        if len({score for score, _ in scored}) < 2:
            return [], []
        order = [number for _, number in sorted(scored, key=lambda pair: -pair[0])]
        count = min(count, len(order) // 2)
        return order[:count], order[-count:]


def try_rewards(rewards: Sequence[Reward], call: RewardCall, *, workers: int = 1, timeout: float = 120) -> list[Trial]:
    """Try each reward separately on the same completions; one that fails does not stop the others."""
    return [_try_reward(reward, call, workers, timeout) for reward in rewards]


def _try_reward(reward: Reward, call: RewardCall, workers: int, timeout: float) -> Trial:
    with Scorer([reward], workers=workers, timeout=timeout) as scorer:
        try:
            result = scorer.score(call)
        except UserError as error:
            return Trial(reward.name, [None] * len(call), call.groups(), len(call), str(error))
    scores = [None if math.isnan(value) else value for value in result.rewards_SR[:, 0].tolist()]
    failures = int(result.metrics.get(f"rewards/{reward.name}/failed", 0))
    seconds = result.metrics[f"rewards/{reward.name}/seconds"]
    trial = Trial(reward.name, scores, call.groups(), failed=failures, seconds=seconds)
    is_suspicious = len(set(trial.known)) == 1 and all(isinstance(completion, list) for completion in call.completions)
    if is_suspicious and reward.runs != "async" and not isinstance(reward.function, nn.Module):
        as_text = replace(call, completions=texts_of(call.completions))
        with suppress(UserError):  # it cannot read text
            attempts = InProcessRunner().run(reward, as_text, timeout)
            values = [outcome.values for _, outcome in attempts if isinstance(outcome, RewardValues)]
            if len(values) == len(attempts):
                flat = chain.from_iterable(values)
                totals = [sum(v for _, v in one.pairs) if isinstance(one, PartRewards) else one for one in flat]
                usable = [one if one is not None and abs(one) <= MAX_REWARD else None for one in totals]
                return replace(trial, on_text=usable)
    return trial


def remarks(trials: Sequence[Trial], weights: Sequence[float] | None = None, *, each_scaled: bool = False) -> list[str]:
    """Describe problems of rewards. `each_scaled`: the method normalizes every reward separately."""
    problems = [f"reward '{trial.name}' {remark}" for trial in trials for remark in _remarks_on(trial)]
    if not each_scaled and (scales := _remark_on_scales(trials, weights or [1.0] * len(trials))):
        problems.append(scales)
    working = [trial for trial in trials if trial.known]
    flat = [all(_is_flat(trial.scores[a:b]) for trial in working) for a, b in trials[0].groups] if working else []
    if flat and any(flat) and not all(flat):
        prompts = f"{sum(flat)} of {counted(len(flat), 'prompt')}"
        problems.append(f"no reward separates the completions of {prompts}: their advantages are 0")
    return problems


def _remarks_on(trial: Trial) -> list[str]:
    if trial.failure is not None:
        reason = trial.failure.partition("' failed on all ")[2].partition(": ")[2] or trial.failure
        reason = reason.replace(f"reward '{trial.name}' must", "it must")
        return [f"always fails: {reason}"]
    problems = []
    if trial.failed:
        problems.append(
            f"failed on {trial.failed} of {counted(len(trial.scores), 'completion')}; see the warning above"
        )
    known = trial.known
    if not known:
        return [*problems, "applies to none of the completions (None throughout)"]
    if len(set(known)) == 1:
        problems.append(f"gives {known[0]:g} to every completion: it cannot separate them and has no effect")
        if trial.on_text is not None and not _are_alike(trial.on_text, trial.scores):
            problems.append(f"gives other values for plain text: it seems to measure the message list. {IN_MESSAGES}")
    elif all(_is_flat(trial.scores[a:b]) for a, b in trial.groups) and any(b - a > 1 for a, b in trial.groups):
        why = "advantages compare completions of the same prompt"
        problems.append(f"differs between prompts but never within a group: {why}, so it has no effect")
    if trial.seconds > SLOW_SECONDS:
        problems.append(
            f"took {trial.seconds:.1f} s for {counted(len(trial.scores), 'completion')}; raise trl.reward_num_workers"
        )
    return problems


def _remark_on_scales(trials: Sequence[Trial], weights: Sequence[float]) -> str | None:
    """Return a remark if one reward outweighs another."""
    spreads = [((t.spread or 0.0) * abs(w), t.name) for t, w in zip(trials, weights, strict=True)]
    moving = sorted((spread, name) for spread, name in spreads if spread > 0)
    if not moving or (times := moving[-1][0] / moving[0][0]) < SPREAD_RATIO:
        return None
    varies = f"reward '{moving[-1][1]}' varies {times:.0f} times as much as '{moving[0][1]}', which will hardly count"
    return f"{varies}: set trl.reward_weights, or use `rl: gdpo`, which scales each reward by itself"


def _are_alike(some: Sequence[Value], others: Sequence[Value]) -> bool:
    """Return whether values are the same but for the rounding of scores, which are kept in float32."""
    return all(
        one is other if one is None or other is None else math.isclose(one, other, rel_tol=ROUNDING)
        for one, other in zip(some, others, strict=True)
    )


def _is_flat(scores: Sequence[Value]) -> bool:
    return len({score for score in scores if score is not None}) < 2
