"""Prompts in, scored groups out, one rollout at a time."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from upweight.data.raw_row import OWN_COLUMNS
from upweight.errors import UserError
from upweight.log import logger
from upweight.methods.base import Method
from upweight.rewards.call import RewardCall
from upweight.rewards.scorer import Scorer, Scores
from upweight.rollout.plan import Plan, PromptOrder
from upweight.rollout.replay import ReplayBuffer
from upweight.rollout.reroll import Reroll
from upweight.rollout.rollout import PromptRows, Rollout
from upweight.rollout.summary import has_signal, summary
from upweight.types import Completion, Group, Prompts, Sampling


class CompletionSource(Protocol):
    """Writes the completions of prompts: a sampling backend, a user's function or an environment."""

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        """Give every group `count` completions; `done` hears of each group as it ends."""
        ...


@dataclass(frozen=True)
class Ranks:
    """This process among those that produce a rollout together."""

    rank: int = 0
    count: int = 1
    gather: Callable[[Any], list[Any]] = field(default=lambda value: [value])  # every rank's value, on every rank


@dataclass
class Producer:
    """Everything between the prompts and the trainer. All ranks call it alike and get the same rollouts."""

    method: Method
    plan: Plan
    rows: PromptRows
    order: PromptOrder
    completion_source: CompletionSource
    scorer: Scorer
    sampling: Sampling
    decode: Callable[[list[int]], str]
    seed: int = 0
    extra_rounds: int = 0  # of sampling anew what came out without signal
    streaming_groups: int | None = None  # groups scored together while others are still being written
    ranks: Ranks = field(default_factory=Ranks)
    replay: ReplayBuffer | None = None
    reroll: Reroll | None = None
    longest: Callable[[Sequence[Group]], int] | None = None  # tokens that completions of these prompts may have
    prove: Callable[[Prompts, Sampling, Callable[[Any], list[Any]]], None] | None = None  # the sampler, on all ranks
    rollouts: int = 0
    tokens: int = 0  # of prompts and completions so far

    def produce(self, version: int, trainer_state: Any = None) -> Rollout:
        """The next rollout, written by policy `version` or, where tokens say so themselves, later ones."""
        began = time.perf_counter()
        number, self.rollouts = self.rollouts, self.rollouts + 1
        again = [] if self.reroll is None else self.reroll.take(_progress(trainer_state), self.plan.groups)
        fresh = self.order.take(self.plan.groups - len(again))
        groups, metrics = self._scored([*fresh, *again], (number, 0), trainer_state)
        if reason := _failed_throughout(groups):  # a server that was started anew took all of them with it
            logger.warning("warning: %s; they are played again", reason)
            groups, metrics = self._scored([*fresh, *again], (number, 0), trainer_state)
            metrics["rollout/played_again"] = 1.0
        _require_some(groups)
        if self.extra_rounds:
            metrics["rollout/sampled_again"] = float(self._resample(groups, number, trainer_state))
        for group in groups:
            written = [part for one in group.completions for part in (one, *one.earlier)]
            group.version = min((one for each in written for one in each.versions), default=version)
        self.tokens += sum(len(group.prompt_ids) + len(one.ids) for group in groups for one in group.completions)
        if self.reroll is not None:
            metrics["reroll/tried_again"] = float(len(again))
        metrics |= {"num_tokens": float(self.tokens), "rollout/seconds": time.perf_counter() - began}
        rollout = Rollout(number, version, groups, metrics)
        return rollout if self.method.reward_names else self.finish(rollout)

    def finish(self, rollout: Rollout, compared: int | None = None) -> Rollout:
        """A scored rollout with advantages, and with what is known of it.

        `compared`: how many completions that follow each other are compared, where that is not the whole group. A
        method that scores by features has whoever holds the model do that, and call this afterwards.
        """
        groups = rollout.groups
        self.add_advantages(groups, compared)
        rollout.metrics |= summary(groups, self.names, self.method)
        if self.reroll is not None:
            self.reroll.note(groups)
            rollout.metrics["reroll/waiting"] = float(len(self.reroll.waiting))
        if self.replay is not None:
            rollout.groups, logged = self.replay.fill(groups, rollout.version, (self.seed, rollout.number))
            rollout.metrics |= logged
        return rollout

    @property
    def names(self) -> Sequence[str]:
        """Names of the rewards."""
        return self.method.reward_names or self.scorer.names

    def _resample(self, groups: list[Group], number: int, trainer_state: Any) -> int:
        """Replace groups without signal by those of further prompts, within bounds; how many were sampled."""
        again = 0
        for attempt in range(1, self.extra_rounds + 1):
            dull = [place for place, group in enumerate(groups) if not has_signal(group)]
            if not dull:
                break
            fresh, _ = self._scored(self.order.take(len(dull)), (number, attempt), trainer_state)
            again += len(dull)
            for place, group in zip(dull, fresh, strict=True):
                if has_signal(group):
                    groups[place] = group
        return again

    def evaluate(self, rows: PromptRows, count: int, trainer_state: Any = None) -> list[Group]:
        """Scored groups of `count` completions for rows of an evaluation; the state of training stays as it was."""
        found: list[Group] = []
        rewards = self.scorer.state()
        try:
            for start in range(0, len(rows), self.plan.groups):
                stop = min(start + self.plan.groups, len(rows))
                groups = [_group(number, rows[number]) for number in range(start, stop)]
                scored, _ = self._share(groups, count, (2**31, start), trainer_state)
                found += scored
        finally:
            self.scorer.restore(rewards)
        _require_some(found)
        return found

    def state(self) -> dict[str, Any]:
        """What a later run needs to go on from here, as plain values."""
        return {
            "position": self.order.position,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "rewards": self.scorer.state(),
            "replay": None if self.replay is None else self.replay.state(),
            "reroll": None if self.reroll is None else list(self.reroll.waiting),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self.order.position, self.rollouts, self.tokens = state["position"], state["rollouts"], state["tokens"]
        self.scorer.restore(state["rewards"])
        if self.replay is not None:
            self.replay.restore(state.get("replay") or [], self.rows)
        if self.reroll is not None:
            self.reroll.waiting.extend(state.get("reroll") or [])

    def _scored(
        self, numbers: Sequence[int], round_: tuple[int, int], trainer_state: Any
    ) -> tuple[list[Group], dict[str, float]]:
        groups = [_group(number, self.rows[number]) for number in numbers]
        return self._share(groups, self.plan.size, round_, trainer_state)

    def _share(
        self, groups: list[Group], count: int, round_: tuple[int, int], trainer_state: Any
    ) -> tuple[list[Group], dict[str, float]]:
        """Every rank writes and scores its share of the groups; all of them come back in order."""
        first, stop = shares_of(len(groups), self.ranks.count)[self.ranks.rank]
        # One seed for all ranks, and the place of this rank's share: the same is sampled on any number of ranks.
        seed = int(np.random.SeedSequence((self.seed, *round_)).generate_state(1)[0])
        sampling = dataclasses.replace(self.sampling, seed=seed, first=first)
        if self.longest is not None:
            sampling = dataclasses.replace(sampling, max_new_tokens=self.longest(groups))
        if self.prove is not None:
            self.prove([group.prompt_ids for group in groups], sampling, self.ranks.gather)
        metrics = self._write_and_score(groups[first:stop], count, sampling, trainer_state)
        shares = self.ranks.gather((groups[first:stop], metrics))
        groups = [group for theirs, _ in shares for group in theirs]
        names = {name for _, found in shares for name in found}
        known = {name: [found[name] for _, found in shares if name in found] for name in sorted(names)}
        return groups, {name: _joined(name, values) for name, values in known.items()}

    def _write_and_score(
        self, groups: list[Group], count: int, sampling: Sampling, trainer_state: Any
    ) -> dict[str, float]:
        """Completions and rewards of this rank's groups; scoring runs beside the writing where streaming is on."""
        if not groups:
            return {}
        began = time.perf_counter()
        streamed: list[tuple[list[Group], Future[Scores]]] = []
        waiting: list[Group] = []

        def done(place: int) -> None:
            waiting.append(groups[place])
            if len(waiting) >= (self.streaming_groups or 1):
                streamed.append((list(waiting), self.scorer.submit(self.reward_call(waiting, trainer_state))))
                waiting.clear()

        self.completion_source(groups, count, sampling, done if self.streaming_groups else None)
        written = time.perf_counter() - began
        rest = waiting if self.streaming_groups else groups
        scores_here = rest and not self.method.reward_names
        scored = [(rest, self.scorer.score(self.reward_call(rest, trainer_state)))] if scores_here else []
        metrics = _collect([*((part, future.result()) for part, future in streamed), *scored])
        parts = [part for group in groups for one in group.completions for part in (one, *one.earlier)]
        tokens = sum(len(one.ids) if one.sampled is None else sum(one.sampled) for one in parts)
        return metrics | {
            "rollout/generation_seconds": written,
            "rollout/tokens_per_second": tokens / max(written, 1e-9),
        }

    def reward_call(self, groups: Sequence[Group], trainer_state: Any = None) -> RewardCall:
        """What reward functions are handed for these groups."""
        each = [(group, one) for group in groups for one in group.completions if one.failure is None]
        names = dict.fromkeys(name for group in groups for name in group.row if name not in OWN_COLUMNS)
        columns = {name: [group.row.get(name) for group, _ in each] for name in names}
        for name in dict.fromkeys(name for group in groups for name in group.extras):
            columns[name] = [value for group in groups for value in _extra(group, name)]
        return RewardCall(
            prompts=[group.row.get("prompt") for group, _ in each],
            completions=[self._answer(group, one) for group, one in each],
            completion_ids=[one.written for _, one in each],
            columns=columns,
            group_S=[place for place, group in enumerate(groups) for one in group.completions if one.failure is None],
            trainer_state=trainer_state,
        )

    def _answer(self, group: Group, completion: Completion) -> Any:
        """A completion as rewards read it: messages where the prompt is, unless a rollout function wrote text."""
        if completion.messages is not None:
            return list(completion.messages)
        if completion.text is not None:
            return completion.text
        text = self.decode(completion.written)
        return text if isinstance(group.row.get("prompt"), str) else [{"role": "assistant", "content": text}]

    def add_advantages(
        self, groups: Sequence[Group], compared: int | None = None, drift_S: Tensor | None = None
    ) -> None:
        """Put the method's advantages into scored groups."""
        rewards_SR = torch.cat([_rewards(group) for group in groups])
        sizes = torch.tensor([len(group.completions) for group in groups])
        group_S = torch.repeat_interleave(torch.arange(len(groups)), sizes)
        if compared is not None:
            group_S = torch.arange(len(rewards_SR)) // compared
        advantage_S = self.method.advantages(rewards_SR, group_S, drift_S)
        for group, own_S in zip(groups, advantage_S.split(sizes.tolist()), strict=True):
            group.advantage_S = own_S


def shares_of(count: int, ranks: int) -> list[tuple[int, int]]:
    """The first and the end of each rank's share of so many groups."""
    return list(pairwise(count * number // ranks for number in range(ranks + 1)))


def _group(number: int, row: Mapping[str, Any]) -> Group:
    return Group(number, row, list(row["prompt_ids"] if "prompt_ids" in row else row["ids"]))


def _progress(trainer_state: Any) -> float:
    """Share of training that is done."""
    return trainer_state.global_step / trainer_state.max_steps if getattr(trainer_state, "max_steps", 0) else 0.0


def _rewards(group: Group) -> Tensor:
    assert group.rewards_SR is not None, "a group reached the trainer without rewards"
    return group.rewards_SR


def _extra(group: Group, name: str) -> list[Any]:
    values = group.extras.get(name) or [None] * len(group.completions)
    return [value for value, one in zip(values, group.completions, strict=True) if one.failure is None]


def _failed_throughout(groups: Sequence[Group]) -> str | None:
    """Why not one completion came of a whole rollout; None where some did."""
    failures = [one.failure for group in groups for one in group.completions]
    if not failures or None in failures:
        return None
    reason = Counter(failures).most_common(1)[0][0]
    return f"the environment failed in all {len(failures)} episodes of a rollout: {reason}"


def _require_some(groups: Sequence[Group]) -> None:
    """Raise where not one completion came of a whole rollout."""
    if reason := _failed_throughout(groups):
        raise UserError(reason)


def _collect(scored: Sequence[tuple[list[Group], Scores]]) -> dict[str, float]:
    """Rewards into their groups; metrics of all calls together."""
    logged: dict[str, list[float]] = {}
    for groups, scores in scored:
        start = 0
        for group in groups:
            kept = [number for number, one in enumerate(group.completions) if one.failure is None]
            stop = start + len(kept)
            group.rewards_SR = torch.full((len(group.completions), scores.rewards_SR.shape[1]), torch.nan)
            group.rewards_SR[kept] = scores.rewards_SR[start:stop]
            for name, values in scores.extras.items():
                group.extras[name] = [None] * len(group.completions)
                for number, value in zip(kept, values[start:stop], strict=True):
                    group.extras[name][number] = value
            start = stop
        for name, value in scores.metrics.items():
            logged.setdefault(name, []).append(value)
    return {name: _joined(name, values) for name, values in logged.items()}


def _joined(name: str, values: Sequence[float]) -> float:
    """One value of what several calls or ranks logged: failures and seconds add up, all else is averaged."""
    return sum(values) / (1 if name.endswith(("/failed", "/seconds")) else len(values))
