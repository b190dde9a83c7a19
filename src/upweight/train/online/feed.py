"""The loader of online runs: asks for rollouts and cuts them into steps."""

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback

from upweight.engine.packing import count_batch
from upweight.errors import UserError
from upweight.files import write_text
from upweight.methods.base import Method
from upweight.models.modules import dropout_off
from upweight.rollout.episodes.gym_agents import GymAgents
from upweight.rollout.episodes.runner import EpisodeRunner
from upweight.rollout.producer import Producer
from upweight.rollout.rollout import PromptRows, Rollout, from_plain, to_plain
from upweight.rollout.run_ahead import RunAhead
from upweight.rollout.summary import pass_rates, summary
from upweight.rollout.units import units_of_groups
from upweight.train.distributed.ranks import ShardedWork
from upweight.train.online.feature_matching import FeatureMatching
from upweight.train.step import StepRunner
from upweight.types import Generator, Mean, Unit

STATE = "rollouts.json"
SAVED_LOGPS = ("old_logps", "ref_logps")  # of the rollout under way, in a checkpoint


@dataclass(frozen=True)
class RolloutSchedule:
    """When rollouts are made and who makes them; synchronous training in one process by default."""

    depth: int = 0  # rollouts that may be under way before they are needed
    threaded: bool = False  # write them while the trainer works
    sync_interval: int = 1  # optimizer steps between two syncs of the sampler
    broadcast: Callable[[Rollout | None], Rollout] | None = (
        None  # rank 0's rollout on every rank, where it alone drives
    )
    drives: bool = True  # this rank produces
    sharded_work: ShardedWork | None = (
        None  # how ranks that hold shards take part in a sync; None where rank 0 holds all
    )
    gathered_weights: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, this rank holds all weights


@dataclass
class RolloutFeed:
    """The rollout under way and how much of it has been trained on."""

    producer: Producer
    method: Method
    generator: Generator | None  # None: a user's function samples from the policy itself
    eval_size: int  # completions for each prompt of an evaluation
    schedule: RolloutSchedule = RolloutSchedule()
    mask_truncated: bool = False
    sampler_logps: bool = False  # train against what the sampler said of its tokens
    skip_zero_advantage: bool = True  # leave out completions that cannot contribute
    recompute_replayed: bool = True  # compare replayed groups with the policy as it is now, not as it was
    feature_matching: FeatureMatching | None = None  # what scores by features, where that is the method
    on_rollout: list[Callable[[Rollout, int], None]] = field(default_factory=list)  # told of each rollout and its step
    on_evaluation: list[Callable[[Rollout, int, str], None]] = field(
        default_factory=list
    )  # the same, and the set's name
    current: Rollout | None = None
    trained: int = 0  # steps taken on the current rollout
    units: list[Unit] = field(default_factory=list)
    demonstrations: list[Unit] = field(default_factory=list)  # of each group, where true answers are learned too
    counts: dict[str, float] = field(default_factory=dict)
    synced: int | None = None  # step of the last sync

    def __post_init__(self) -> None:
        self.ahead = RunAhead(self._produce, threaded=self.schedule.threaded)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every prompt comes up once."""
        return self.producer.plan.steps_per_epoch(len(self.producer.rows))

    def next_step(self, runner: StepRunner, model: nn.Module, state: Any) -> dict[str, Any]:
        """What the next optimizer step trains on, over all ranks."""
        plan = self.producer.plan
        runner.meters.add(_means(self._sync(state.global_step), runner.accelerator.device))
        if self.current is None or self.trained >= plan.updates:
            began = time.perf_counter()
            rollout = self._score_by_features(
                self._broadcast(self.ahead.take(state) if self.schedule.drives else None), runner, model
            )
            oldest = min(group.version for group in rollout.groups)
            waited = {"rollout/wait_seconds": time.perf_counter() - began, "rollout/lag": state.global_step - oldest}
            runner.meters.add(_means(rollout.metrics | waited, runner.accelerator.device))
            self._start_rollout(rollout, 0, runner, model)
            for notify in self.on_rollout:
                notify(rollout, state.global_step + 1)
        start = self.trained % plan.steps * plan.step
        stop = start + plan.step
        self.trained += 1
        self._submit_ahead(state)
        # A demonstration is trained on once in a pass, with the first completion of its group.
        shown = self.demonstrations[-(-start // plan.size) : -(-stop // plan.size)]
        return {"units": self.units[start:stop] + shown, "counts": self.counts}

    def _score_by_features(self, rollout: Rollout, runner: StepRunner, model: nn.Module) -> Rollout:
        """The rollout with rewards from features, where they are what scores it."""
        if self.feature_matching is None:
            return rollout
        began, size = time.perf_counter(), self.producer.plan.size
        rollout.metrics |= self.feature_matching.score(rollout.groups, size, runner, model)
        rollout.metrics["rollout/feature_seconds"] = time.perf_counter() - began
        return self.producer.finish(rollout, size)

    def _sync(self, step: int) -> dict[str, float]:
        """Let the sampler follow the policy, every so many steps exactly; how long that took."""
        due = self.synced is None or (step != self.synced and step % self.schedule.sync_interval == 0)
        if not due or (self.generator is None and self.schedule.sharded_work is None):
            return {}
        began = time.perf_counter()
        self.sync(step)
        return {"rollout/sync_seconds": time.perf_counter() - began} if self.schedule.drives else {}

    def sync(self, step: int) -> None:
        """Have the sampler take the weights as they are; every rank calls it, and those with shards help."""
        if self.schedule.drives and self.generator is not None:
            try:
                self.generator.sync(step)
            finally:
                if self.schedule.sharded_work is not None:
                    self.schedule.sharded_work.dismiss()
        elif self.schedule.sharded_work is not None:
            self.schedule.sharded_work.follow()
        self.synced = step

    def _produce(self, state: Any) -> Rollout:
        version = state.global_step if self.generator is None else self.generator.version()
        with self.schedule.gathered_weights():
            return self.producer.produce(version, state)

    def _broadcast(self, own: Rollout | None) -> Rollout:
        """The rollout of the rank that drives."""
        if self.schedule.broadcast is not None:
            return self.schedule.broadcast(own)
        assert own is not None
        return own

    def _submit_ahead(self, state: Any) -> None:
        """Ask for rollouts so early that each is begun at most `depth` passes of steps before it is needed."""
        plan = self.producer.plan
        while self.schedule.drives and self.schedule.depth:
            until_needed = plan.updates - self.trained + 1 + plan.updates * len(self.ahead)
            if len(self.ahead) >= self.schedule.depth or until_needed > self.schedule.depth * plan.steps:
                return
            self.ahead.submit(copy.copy(state))

    def evaluate(
        self, rows: PromptRows, state: Any, runner: StepRunner, model: nn.Module, name: str = "eval"
    ) -> dict[str, float]:
        """Rewards, pass rates and lengths on held-out prompts; with features also what they and true answers say."""
        if self.synced != state.global_step:
            self.sync(state.global_step)
        step, names = state.global_step, self.producer.names
        own = None
        if self.schedule.drives:
            if self.producer.scorer.has_state:
                self.ahead.wait()  # it would change the state that an evaluation puts back
            with self.schedule.gathered_weights():
                own = Rollout(self.producer.rollouts, step, self.producer.evaluate(rows, self.eval_size, state))
        rollout = self._broadcast(own)
        if self.feature_matching is not None:
            found = self.feature_matching.score(rollout.groups, self.eval_size, runner, model)
            found["ebft/ce_loss"] = self.feature_matching.cross_entropy(rollout.groups, runner, model)
        else:
            found = pass_rates(rollout.groups, names)
        for notify in self.on_evaluation:
            notify(rollout, step, name)
        return summary(rollout.groups, names, self.method) | found

    def save(self, folder: Path) -> None:
        """Write to a checkpoint what shapes the steps after it."""
        plain = None
        if self.current is not None and self.trained < self.producer.plan.updates:
            plain = to_plain(self.current)
            for name in SAVED_LOGPS:
                known = [[getattr(sample, name) for sample in unit.samples] for unit in self.units]
                plain[name] = [[None if one is None else one.tolist() for one in each] for each in known]
        ahead = [to_plain(rollout) for rollout in self.ahead.wait()]  # nothing that was sampled is lost
        state = {"producer": self.producer.state(), "trained": self.trained, "current": plain, "ahead": ahead}
        write_text(folder / STATE, json.dumps(state))

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        if not (folder / STATE).is_file():
            raise UserError(f"resume_from_checkpoint: {folder} has no {STATE}: no run with rollouts wrote it.")
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.producer.restore(state["producer"])
        self.ahead.put(from_plain(plain, self.producer.rows) for plain in state["ahead"])
        if state["current"] is None:
            self.current = None
            return
        kept = {name: state["current"].pop(name) for name in SAVED_LOGPS if name in state["current"]}
        self._start_rollout(from_plain(state["current"], self.producer.rows), state["trained"])
        for name, known in kept.items():
            self.units = [
                unit if None in logps else _with_logps(unit, name, [np.array(one, np.float32) for one in logps])
                for unit, logps in zip(self.units, known, strict=True)
            ]

    def close(self) -> None:
        """End the thread that produces and the processes that compute rewards."""
        self.ahead.close()
        self.producer.scorer.close()
        if isinstance(self.producer.completion_source, EpisodeRunner | GymAgents):
            self.producer.completion_source.close()
        if self.generator is not None:
            self.generator.close()
        self.synced = None

    def old_logps(self) -> list[list[float] | None]:
        """For each completion under way, what the policy said of its tokens before it trained on them, if asked."""
        samples = (unit.samples[0] if len(unit.samples) == 1 else None for unit in self.units)
        return [None if one is None or one.old_logps is None else one.old_logps.tolist() for one in samples]

    def current_samples(self) -> Iterator[dict[str, Any]]:
        """What the rollout under way trains on, for study."""
        for sample in (sample for unit in self.units for sample in unit.samples):
            yield {
                "text": self.producer.decode(sample.ids.tolist()),
                "ids": sample.ids.tolist(),
                "scored": sample.scored.tolist(),
                "advantage": sample.advantage,
            }

    def _start_rollout(
        self, rollout: Rollout, trained: int, runner: StepRunner | None = None, model: Any = None
    ) -> None:
        """Train on this rollout from now on; later steps compare with the policy as it is now."""
        plan = self.producer.plan
        self.current, self.trained = rollout, trained
        make = units_of_groups if self.feature_matching is None else self.feature_matching.units
        self.units = make(rollout.groups, mask_truncated=self.mask_truncated, sampler_logps=self.sampler_logps)
        self.demonstrations = []
        if self.feature_matching is not None and self.feature_matching.method.ce_coef:
            self.demonstrations = self.feature_matching.demonstrations(rollout.groups)
        totals = self.method.count(count_batch(self.units))
        self.counts = {name: float(total) / plan.steps for name, total in totals.items() if name.startswith("rollout_")}
        if runner is not None and self.method.needs_drift:
            self._add_drift_to_advantages(rollout, runner, model)
        keeps_old = not self.recompute_replayed and any(group.replayed for group in rollout.groups)
        has_ratio = self.feature_matching is None or not self.feature_matching.strided
        if runner is not None and has_ratio and (plan.updates > 1 or keeps_old):
            with dropout_off(model):
                logps = runner.logps(model, self.units)
            self.units = [
                _with_logps(
                    unit,
                    "old_logps",
                    [one.sampler_logps for one in unit.samples] if self._keeps_sampler_logps(rollout, unit) else own,
                )
                for unit, own in zip(self.units, logps, strict=True)
            ]

    def _add_drift_to_advantages(self, rollout: Rollout, runner: StepRunner, model: Any) -> None:
        """Have advantages count how far the policy is from the reference; units keep the reference's log-probs."""
        assert runner.reference is not None
        with dropout_off(model):
            own = runner.logps(model, self.units)
            with runner.reference.use(model) as reference:
                theirs = runner.logps(reference, self.units)
        drifts = [
            sum(float((policy - other).sum()) for policy, other in zip(*parts, strict=True))
            for parts in zip(own, theirs, strict=True)
        ]
        self.producer.add_advantages(rollout.groups, drift_S=torch.tensor(drifts, dtype=torch.float64))
        units = units_of_groups(rollout.groups, mask_truncated=self.mask_truncated, sampler_logps=self.sampler_logps)
        self.units = [_with_logps(unit, "ref_logps", logps) for unit, logps in zip(units, theirs, strict=True)]

    def _keeps_sampler_logps(self, rollout: Rollout, unit: Unit) -> bool:
        """Whether a sample is compared with the policy that wrote it, long ago."""
        kept = rollout.groups[unit.group].replayed and not self.recompute_replayed
        return kept and all(sample.sampler_logps is not None for sample in unit.samples)


class RolloutLoader:
    """What the Trainer iterates over: what is left of an epoch's steps, each fetched when it is asked for."""

    def __init__(self, rollouts: RolloutFeed, next_step: Callable[[], dict[str, Any]], done: Callable[[], int]) -> None:
        self.dataset = rollouts.producer.rows
        self._length = rollouts.steps_per_epoch
        self._next, self._done = next_step, done

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._done() % self._length, self._length):
            yield self._next()


class SaveRollouts(TrainerCallback):
    """Puts the state of the rollouts into each checkpoint."""

    def __init__(self, rollouts: RolloutFeed) -> None:
        self.rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.rollouts.save(folder)


def _with_logps(unit: Unit, name: str, logps: Sequence[Any]) -> Unit:
    samples = [dataclasses.replace(one, **{name: own}) for one, own in zip(unit.samples, logps, strict=True)]
    return dataclasses.replace(unit, samples=tuple(samples))


def _means(metrics: Mapping[str, float], device: torch.device) -> dict[str, Mean]:
    one = torch.ones((), device=device, dtype=torch.float64)
    return {name: Mean(one * value, one) for name, value in metrics.items()}
