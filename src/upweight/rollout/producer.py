"""Produces one rollout at a time: prompts in, scored groups out."""

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.log import logger
from upweight.methods.base import Method
from upweight.rewards.scorer import RewardResult, Scorer
from upweight.rollout.completion_source import CompletionSource, with_images
from upweight.rollout.credit import credit_tokens
from upweight.rollout.fed_prompts import FedPrompts
from upweight.rollout.plan import Plan, PromptOrder
from upweight.rollout.replay import ReplayBuffer, Reroll
from upweight.rollout.rollout import PromptRows, Rollout
from upweight.rollout.scoring import assign_rewards, reward_call
from upweight.rollout.summary import has_signal, join_metrics, summary
from upweight.rollout.user_advantages import add_user_advantages
from upweight.types import Compiles, Group, Prompts, Sampling


@dataclass(frozen=True)
class Ranks:
    """This rank, and how it exchanges values with the other ranks."""

    rank: int = 0
    count: int = 1
    gather: Callable[[Any], list[Any]] = field(default=lambda value: [value])  # every rank's value, on every rank

    def share(self, count: int) -> slice:
        """Return which of `count` groups are this rank's."""
        return slice(count * self.rank // self.count, count * (self.rank + 1) // self.count)


@dataclass
class Producer:
    """Samples and scores rollouts. Every rank calls it in the same way and gets the same rollouts."""

    method: Method
    plan: Plan
    rows: PromptRows
    order: PromptOrder | FedPrompts
    completion_source: CompletionSource
    scorer: Scorer
    sampling: Sampling
    decode: Callable[[list[int]], str]
    seed: int = 0
    extra_rounds: int = 0  # of sampling other prompts in place of groups without signal
    streaming_groups: int | None = None  # groups scored together while others are still being sampled
    ranks: Ranks = field(default_factory=Ranks)
    replay: ReplayBuffer | None = None
    reroll: Reroll | None = None
    longest: Callable[[Sequence[Group]], int] | None = None  # the limit of new tokens for these prompts
    check_sampling: Callable[[Prompts, Sampling, Callable[[Any], list[Any]]], None] | None = None  # on all ranks
    compiles: Compiles | None = None  # the sampling backend, if it is one that compiles
    num_rollouts: int = 0
    tokens: int = 0  # of prompts and completions so far

    def produce(self, version: int, trainer_state: Any = None) -> Rollout:
        """Return the next rollout; tokens without a version count as sampled by policy `version`."""
        began = time.perf_counter()
        number, self.num_rollouts = self.num_rollouts, self.num_rollouts + 1
        rerolled: list[int] = []
        if self.reroll is not None:
            steps = getattr(trainer_state, "max_steps", 0)
            rerolled = self.reroll.take(trainer_state.global_step / steps if steps else 0.0, self.plan.groups)
        fresh = self.order.take(self.plan.groups - len(rerolled), getattr(trainer_state, "global_step", 0))
        arguments = self.rows, [*fresh, *rerolled], self.plan.group_size, (number, 0), trainer_state
        groups, metrics = self._sample_groups(*arguments)
        if reason := _failed_throughout(groups):  # as when a server restarts during a rollout
            logger.warning("warning: %s; the rollout is repeated", reason)
            groups, metrics = self._sample_groups(*arguments)
            metrics["rollout/played_again"] = 1.0
        if reason := _failed_throughout(groups):
            raise UserError(reason)
        if self.extra_rounds:
            metrics["rollout/sampled_again"] = float(self._resample_groups(groups, number, trainer_state))
        for group in groups:
            segments = [segment for one in group.completions for segment in one.segments]
            group.version = min((version for segment in segments for version in segment.versions), default=version)
        self.tokens += sum(len(group.prompt_ids) + len(one.ids) for group in groups for one in group.completions)
        if self.reroll is not None:
            metrics["reroll/tried_again"] = float(len(rerolled))
        metrics |= {"num_tokens": float(self.tokens), "rollout/seconds": time.perf_counter() - began}
        rollout = Rollout(number, version, groups, metrics)
        return rollout if self.method.computed_rewards else self.finish(rollout)

    def finish(self, rollout: Rollout, compared: int | None = None) -> Rollout:
        """Add advantages and metrics to a scored rollout, and apply re-roll and replay.

        `compared` is the number of consecutive completions that are compared, where that is not the whole group. A
        method that computes its rewards from features is scored by the trainer, which calls this afterwards.
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
        return self.method.computed_rewards or self.scorer.names

    def _resample_groups(self, groups: list[Group], number: int, trainer_state: Any) -> int:
        """Replace groups without signal by groups of further prompts; return how many groups were sampled."""
        sampled = 0
        for attempt in range(1, self.extra_rounds + 1):
            without_signal = [index for index, group in enumerate(groups) if not has_signal(group)]
            if not without_signal:
                break
            numbers = self.order.take(len(without_signal), getattr(trainer_state, "global_step", 0))
            fresh, _ = self._sample_groups(self.rows, numbers, self.plan.group_size, (number, attempt), trainer_state)
            sampled += len(without_signal)
            for index, group in zip(without_signal, fresh, strict=True):
                if has_signal(group):
                    groups[index] = group
        return sampled

    def evaluate(
        self, rows: PromptRows, count: int, trainer_state: Any = None, between: Callable[[], None] | None = None
    ) -> list[Group]:
        """Return scored groups of `count` completions for evaluation rows; the state of the scorer is restored."""
        evaluated: list[Group] = []
        rewards = self.scorer.state()
        try:
            for batch in self.batches(rows):
                if between is not None:
                    between()
                scored, _ = self._sample_groups(rows, batch, count, (2**31, batch.start), trainer_state)
                evaluated += scored
        finally:
            self.scorer.restore(rewards)
        if reason := _failed_throughout(evaluated):
            raise UserError(reason)
        return evaluated

    def batches(self, rows: PromptRows) -> list[range]:
        """Return the rows of an evaluation by calls of the sampler."""
        return [range(n, min(n + self.plan.groups, len(rows))) for n in range(0, len(rows), self.plan.groups)]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {
            **self.order.state(),
            "rollouts": self.num_rollouts,
            "tokens": self.tokens,
            "rewards": self.scorer.state(),
            "replay": None if self.replay is None else self.replay.state(),
            "reroll": None if self.reroll is None else list(self.reroll.waiting),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.order.restore(state)
        self.num_rollouts, self.tokens = state["rollouts"], state["tokens"]
        self.scorer.restore(state["rewards"])
        if self.replay is not None:
            self.replay.restore(state.get("replay") or [], self.rows)
        if self.reroll is not None:
            self.reroll.waiting = deque(state.get("reroll") or [], self.reroll.waiting.maxlen)

    def _sample_groups(
        self, rows: PromptRows, numbers: Sequence[int], count: int, round_: tuple[int, int], trainer_state: Any
    ) -> tuple[list[Group], dict[str, float]]:
        """Sample and score this rank's share of the rows; return the groups of all ranks in order, and metrics."""
        groups: list[Group] = []
        for number in numbers:
            row = rows[number]
            groups.append(Group(number, row, list(row["prompt_ids" if "prompt_ids" in row else "input_ids"])))
        mine = self.ranks.share(len(groups))
        # One seed for all ranks and the position of this rank's share: any number of ranks samples the same.
        seed = int(np.random.SeedSequence((self.seed, *round_)).generate_state(1)[0])
        sampling = dataclasses.replace(self.sampling, seed=seed, first=mine.start)
        if self.longest is not None:
            sampling = dataclasses.replace(sampling, max_new_tokens=self.longest(groups))
        compiled = 0.0 if self.compiles is None else self.compiles.compile_seconds
        if self.check_sampling is not None:
            prompts = [group.prompt_ids for group in groups]
            self.check_sampling(prompts, with_images(sampling, groups), self.ranks.gather)
        metrics = self._fill_groups(groups[mine], count, sampling, trainer_state)
        if self.compiles is not None:
            metrics["rollout/compile_seconds"] = self.compiles.compile_seconds - compiled
        shares = self.ranks.gather((groups[mine], metrics))
        return [group for part, _ in shares for group in part], join_metrics(part for _, part in shares)

    def _fill_groups(self, groups: list[Group], count: int, sampling: Sampling, trainer_state: Any) -> dict[str, float]:
        """Fill this rank's groups with completions and rewards; with streaming, scoring overlaps with sampling."""
        if not groups:
            return {}
        began = time.perf_counter()
        streamed: list[tuple[list[Group], Future[RewardResult]]] = []
        waiting: list[Group] = []

        def done(index: int) -> None:
            waiting.append(groups[index])
            if len(waiting) >= (self.streaming_groups or 1):
                streamed.append((list(waiting), self.scorer.submit(reward_call(waiting, self.decode, trainer_state))))
                waiting.clear()

        with activity(f"sampling {len(groups) * count} completions"):
            self.completion_source(groups, count, sampling, done if self.streaming_groups else None)
        seconds = time.perf_counter() - began
        rest = waiting if self.streaming_groups else groups
        scores_here = rest and not self.method.computed_rewards
        with activity(f"scoring by {', '.join(self.names)} (trl.reward_timeout: {self.scorer.timeout:g} s a call)"):
            scored = [(rest, self.scorer.score(reward_call(rest, self.decode, trainer_state)))] if scores_here else []
            results = [*((part, future.result()) for part, future in streamed), *scored]
            metrics = assign_rewards(results, by_part=self.method.discount is not None)
        for group in groups:
            group.environments = []  # other ranks and checkpoints cannot hold them
        segments = [segment for group in groups for one in group.completions for segment in one.segments]
        tokens = sum(len(one.ids) if one.sampled is None else sum(one.sampled) for one in segments)
        speed = tokens / max(seconds, 1e-9)
        return metrics | {"rollout/generation_seconds": seconds, "rollout/tokens_per_second": speed}

    def add_advantages(
        self, groups: Sequence[Group], compared: int | None = None, log_ratio_S: Tensor | None = None
    ) -> None:
        rewards = [group.rewards_SR for group in groups if group.rewards_SR is not None]
        assert len(rewards) == len(groups), "a group reached the trainer without rewards"
        rewards_SR = torch.cat(rewards)
        sizes = torch.tensor([len(group.completions) for group in groups])
        group_S = torch.repeat_interleave(torch.arange(len(groups)), sizes)
        if compared is not None:
            group_S = torch.arange(len(rewards_SR)) // compared
        if (call := self.method.advantage_function) is not None:
            add_user_advantages(call, groups, group_S, self.method, log_ratio_S)
            return
        advantage_S = self.method.advantages(rewards_SR, group_S, log_ratio_S)
        for group, group_advantage_S in zip(groups, advantage_S.split(sizes.tolist()), strict=True):
            group.advantage_S = group_advantage_S
        if self.method.discount is not None:
            credit_tokens(groups, group_S, self.method, self.method.discount)


def _failed_throughout(groups: Sequence[Group]) -> str | None:
    """Return why every completion of a rollout failed; None where some did not."""
    failures = [one.failure for group in groups for one in group.completions]
    if not failures or None in failures:
        return None
    reason = Counter(failures).most_common(1)[0][0]
    return f"the environment failed in all {len(failures)} episodes of a rollout: {reason}"
