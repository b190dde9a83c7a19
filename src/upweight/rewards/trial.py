"""Rewards tried without training: what each gives, how well it separates completions, and what is odd about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from torch import nn

from upweight.errors import UserError
from upweight.rewards.answers import IN_MESSAGES, Answer, Value
from upweight.rewards.builtin.text import texts_of
from upweight.rewards.call import RewardCall
from upweight.rewards.local import Local
from upweight.rewards.reward import Reward
from upweight.rewards.scorer import Scorer

SLOW = 10.0  # seconds of one call that are worth a word
SCALES = 20.0  # times by which the spread of two rewards may differ without a word


@dataclass(frozen=True)
class Trial:
    """What came of one reward."""

    name: str
    scores: list[Value]  # None: does not apply, or failed
    groups: list[tuple[int, int]]  # where each prompt's completions start and stop
    failed: int = 0
    failure: str | None = None  # why it failed on everything
    seconds: float = 0.0
    on_text: list[Value] | None = None  # what it gives for plain text instead of messages, where that was tried

    @property
    def known(self) -> list[float]:
        """The scores that are numbers."""
        return [score for score in self.scores if score is not None]

    @property
    def mean(self) -> float | None:
        """Mean of the known scores."""
        return fmean(self.known) if self.known else None

    @property
    def spread(self) -> float | None:
        """Standard deviation within groups, averaged over them: what advantages are made of."""
        members = [[score for score in self.scores[a:b] if score is not None] for a, b in self.groups]
        spreads = [stdev(group) for group in members if len(group) > 1]
        return fmean(spreads) if spreads else None

    def summary(self) -> dict[str, Any]:
        """The figures of a table or of a JSON object."""
        known = self.known
        return {
            "name": self.name,
            "mean": self.mean,
            "lowest": min(known, default=None),
            "highest": max(known, default=None),
            "spread_within_groups": self.spread,
            "does_not_apply": len(self.scores) - len(known) - self.failed,
            "failed": self.failed,
            "completions": len(self.scores),
            "seconds": self.seconds,
        }

    def extremes(self, count: int) -> tuple[list[int], list[int]]:
        """Numbers of the best completions and of the worst; none where all score alike."""
        scored = [(score, number) for number, score in enumerate(self.scores) if score is not None]
        if len({score for score, _ in scored}) < 2:
            return [], []
        order = [number for _, number in sorted(scored, key=lambda pair: -pair[0])]
        count = min(count, len(order) // 2)
        return order[:count], order[-count:]


def try_rewards(
    rewards: Sequence[Reward], call: RewardCall, *, workers: int = 1, timeout: float = 120.0
) -> list[Trial]:
    """Each reward by itself on the same completions; one that fails does not keep others from being tried."""
    return [_tried(reward, call, workers, timeout) for reward in rewards]


def _tried(reward: Reward, call: RewardCall, workers: int, timeout: float) -> Trial:
    with Scorer([reward], workers=workers, timeout=timeout) as scorer:
        try:
            found = scorer.score(call)
        except UserError as error:
            return Trial(reward.name, [None] * len(call), call.groups(), len(call), str(error))
    scores = [None if math.isnan(value) else value for value in found.rewards_SR[:, 0].tolist()]
    trial = Trial(
        reward.name,
        scores,
        call.groups(),
        failed=int(found.metrics.get(f"rewards/{reward.name}/failed", 0)),
        seconds=found.metrics[f"rewards/{reward.name}/seconds"],
    )
    is_odd = len(set(trial.known)) == 1 and all(isinstance(one, list) for one in call.completions)
    if not is_odd or reward.runs == "async" or isinstance(reward.function, nn.Module):
        return trial
    return replace(trial, on_text=_on_text(reward, call, timeout))


def _on_text(reward: Reward, call: RewardCall, timeout: float) -> list[Value] | None:
    """The scores of plain text where there were messages; None where the reward cannot read text."""
    attempts = Local().run(reward, replace(call, completions=texts_of(call.completions)), timeout)
    outcomes = [outcome for _, outcome in attempts]
    if not all(isinstance(outcome, Answer) for outcome in outcomes):
        return None
    return [value for outcome in outcomes if isinstance(outcome, Answer) for value in outcome.values]


def remarks(trials: Sequence[Trial], weights: Sequence[float] | None = None, *, each_scaled: bool = False) -> list[str]:
    """What is wrong with rewards, in words. `each_scaled`: the method brings every reward to one scale itself."""
    said = [f"reward '{trial.name}' {remark}" for trial in trials for remark in _remarks(trial)]
    if not each_scaled and (scales := _scales(trials, weights or [1.0] * len(trials))):
        said.append(scales)
    working = [trial for trial in trials if trial.known]
    flat = [all(_is_flat(trial.scores[a:b]) for trial in working) for a, b in trials[0].groups] if working else []
    if flat and any(flat) and not all(flat):
        said.append(f"no reward separates the completions of {sum(flat)} of {len(flat)} prompts: they teach nothing")
    return said


def _remarks(trial: Trial) -> list[str]:
    if trial.failure is not None:
        reason = trial.failure.partition("' failed on all ")[2].partition(": ")[2] or trial.failure
        reason = reason.replace(f"reward '{trial.name}' must", "it must")
        return [f"always fails: {reason}"]
    said = []
    if trial.failed:
        said.append(f"failed on {trial.failed} of {len(trial.scores)} completions; the reason is in the warning above")
    known = trial.known
    if not known:
        return [*said, "applies to none of the completions (None throughout)"]
    if len(set(known)) == 1:
        said.append(f"gives {known[0]:g} to every completion: it cannot separate them and teaches nothing")
        if trial.on_text is not None and trial.on_text != trial.scores:
            said.append(f"gives other values for plain text: it seems to measure the message list. {IN_MESSAGES}")
    elif all(_is_flat(trial.scores[a:b]) for a, b in trial.groups) and any(b - a > 1 for a, b in trial.groups):
        said.append(
            "differs between prompts but never within a group: advantages compare completions of the same prompt, so "
            "it teaches nothing"
        )
    if trial.seconds > SLOW:
        said.append(f"took {trial.seconds:.1f} s for {len(trial.scores)} completions; raise trl.reward_num_workers")
    return said


def _scales(trials: Sequence[Trial], weights: Sequence[float]) -> str | None:
    """A word where one reward drowns another."""
    spreads = {t.name: (t.spread or 0.0) * abs(w) for t, w in zip(trials, weights, strict=True)}
    moving = {name: spread for name, spread in spreads.items() if spread > 0}
    if len(moving) < 2:
        return None
    largest, smallest = max(moving, key=moving.__getitem__), min(moving, key=moving.__getitem__)
    times = moving[largest] / moving[smallest]
    if times < SCALES:
        return None
    return (
        f"reward '{largest}' varies {times:.0f} times as much as '{smallest}', which will hardly count: set "
        "trl.reward_weights, or use `rl: gdpo`, which scales each reward by itself"
    )


def _is_flat(scores: Sequence[Value]) -> bool:
    return len({score for score in scores if score is not None}) < 2
