"""The loader of online runs: it takes rollouts from the producer and splits them into optimizer steps."""

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
from numpy.typing import NDArray
from torch import nn
from transformers import TrainerCallback

from upweight.config.sections.rollout import RolloutSection
from upweight.engine.packing import count_batch
from upweight.errors import UserError
from upweight.files import write_text
from upweight.heartbeat import activity
from upweight.models.modules import dropout_off
from upweight.rollout.producer import Producer
from upweight.rollout.rollout import PromptRows, Rollout, from_plain, to_plain
from upweight.rollout.run_ahead import RunAhead
from upweight.rollout.summary import pass_rates, summary
from upweight.rollout.units import units_of_groups
from upweight.sampler.in_process import InProcess
from upweight.train.distill.teachers import Teachers
from upweight.train.distributed.ranks import ShardedWork
from upweight.train.online.feature_matching import FeatureMatching
from upweight.train.step import StepRunner
from upweight.types import Generator, Mean, Sample, Unit

STATE = "rollouts.json"
SMALLEST_RELEASED = 1 << 10  # bytes of a sampler that is worth the release after a step ran out of memory
SAVED_LOGPS = ("old_logps", "ref_logps", "token_advantages")  # of the rollout under way, in a checkpoint


@dataclass(frozen=True)
class RolloutSchedule:
    """When rollouts are produced and by which ranks; the default is synchronous training in one process."""

    depth: int = 0  # rollouts that may be produced ahead
    threaded: bool = False  # produce them in a thread while the trainer works
    sync_interval: int = 1  # optimizer steps between two syncs of the sampler
    broadcast: Callable[[Rollout | None], Rollout] | None = None  # of rank 0's rollout, where only rank 0 produces
    produces: bool = True  # whether this rank produces rollouts
    sharded_work: ShardedWork | None = None  # of a sync by all ranks; None where rank 0 holds all weights
    gathered_weights: Callable[[], AbstractContextManager[None]] = nullcontext  # holds whole weights while sampling


@dataclass
class RolloutFeed:
    """The current rollout, split into steps, and how many of them have been trained on."""

    producer: Producer
    generator: Generator | None  # None: a user's rollout_func samples
    section: RolloutSection
    schedule: RolloutSchedule
    eval_size: int  # completions for each prompt of an evaluation
    mask_truncated: bool
    sampler_logps: bool  # use the sampler's log-probs in the loss
    feature_matching: FeatureMatching | None = None  # scores rollouts of EBFT
    evaluates_loss: bool = False  # whether evaluations report the loss of their completions
    on_rollout: list[Callable[[Rollout, int], None]] = field(default_factory=list)  # called with (rollout, step)
    on_evaluation: list[Callable[[Rollout, int, str], None]] = field(default_factory=list)  # (rollout, step, set)
    current: Rollout | None = None
    trained: int = 0  # steps taken on the current rollout
    units: list[Unit] = field(default_factory=list)
    demonstrations: list[Unit] = field(default_factory=list)  # one per group, for EBFT's cross-entropy
    counts: dict[str, float] = field(default_factory=dict)
    synced: int | None = None  # step of the last sync

    def __post_init__(self) -> None:
        self.ahead = RunAhead(self._produce, threaded=self.schedule.threaded)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps in one pass over the prompts."""
        return self.producer.plan.steps_per_epoch(len(self.producer.rows))

    def next_step(self, runner: StepRunner, model: nn.Module, trainer_state: Any) -> dict[str, Any]:
        """Return the units of the next optimizer step, of all ranks, from the current rollout or a new one."""
        plan, step = self.producer.plan, trainer_state.global_step
        if self.synced is None or (step != self.synced and step % self.schedule.sync_interval == 0):
            runner.meters.add(_as_means(self.sync(step), runner.accelerator.device))
        if self.current is None or self.trained >= plan.steps_per_rollout:
            began = time.perf_counter()
            with activity("waiting for a rollout"):
                rollout = self._broadcast(self.ahead.take(trainer_state) if self.schedule.produces else None)
            if self.feature_matching is not None:
                scoring = time.perf_counter()
                rollout.metrics |= self.feature_matching.score(rollout.groups, plan.group_size, runner, model)
                rollout.metrics["rollout/feature_seconds"] = time.perf_counter() - scoring
                rollout = self.producer.finish(rollout, plan.group_size)
            oldest = min(group.version for group in rollout.groups)
            waited = {"rollout/wait_seconds": time.perf_counter() - began, "rollout/lag": step - oldest}
            runner.meters.add(_as_means(rollout.metrics | waited, runner.accelerator.device))
            self._start_rollout(rollout, 0, runner, model)
            for callback in self.on_rollout:
                callback(rollout, step + 1)
        start = self.trained % plan.steps_per_pass * plan.step_size
        stop = start + plan.step_size
        self.trained += 1
        while self.schedule.produces and len(self.ahead) < self.schedule.depth:
            until_needed = plan.steps_per_rollout - self.trained + 1 + plan.steps_per_rollout * len(self.ahead)
            if until_needed > self.schedule.depth * plan.steps_per_pass:  # at most `depth` passes of steps ahead
                break
            self.ahead.submit(copy.copy(trainer_state))
        # A demonstration is trained on once in a pass, with the first completion of its group.
        shown = self.demonstrations[-(-start // plan.group_size) : -(-stop // plan.group_size)]
        units = self.units[start:stop]
        if self.producer.method.reads_versions:
            units = [_with_lag(unit, step) for unit in units]
        return {"units": units + shown, "counts": self.counts}

    @property
    def repeats(self) -> bool:
        """Whether the completions of the latest step were trained on before."""
        return self.trained > self.producer.plan.steps_per_pass

    def sync(self, step: int) -> dict[str, float]:
        """Send the weights to the sampler, on every rank, since each may hold a shard; return the time as a metric."""
        began, sharded_work, seconds = time.perf_counter(), self.schedule.sharded_work, {}
        if self.schedule.produces and self.generator is not None:
            try:
                with activity("sending weights to the sampler"):
                    self.generator.sync(step)
            finally:
                if sharded_work is not None:
                    sharded_work.dismiss()
            seconds = {"rollout/sync_seconds": time.perf_counter() - began}
        elif sharded_work is not None:
            sharded_work.follow()
        self.synced = step
        return seconds

    def _produce(self, trainer_state: Any) -> Rollout:
        version = trainer_state.global_step if self.generator is None else self.generator.version()
        with self.schedule.gathered_weights():
            rollout = self.producer.produce(version, trainer_state)
        if self.section.release_sampler:
            self.release_sampler()
        return rollout

    def release_sampler(self) -> bool:
        """Free what sampling in this process holds, until the next rollout; return whether it held anything."""
        if not isinstance(self.generator, InProcess):
            return False
        held = self.generator.held_bytes() >= SMALLEST_RELEASED
        self.generator.close()
        torch.cuda.empty_cache()
        return held

    def _broadcast(self, rollout: Rollout | None) -> Rollout:
        """Return the rollout of the rank that produces, on every rank."""
        if self.schedule.broadcast is not None:
            return self.schedule.broadcast(rollout)
        assert rollout is not None
        return rollout

    def evaluate(
        self,
        rows: PromptRows,
        trainer_state: Any,
        runner: StepRunner,
        model: nn.Module,
        name: str = "eval",
        *,
        between: Callable[[], None] | None = None,  # calls of the sampler; may raise
    ) -> dict[str, float]:
        """Return rewards, pass rates and lengths on held-out prompts; for EBFT feature rewards and cross-entropy."""
        if self.synced != trainer_state.global_step:
            self.sync(trainer_state.global_step)
        step, names, method, produced = trainer_state.global_step, self.producer.names, self.producer.method, None
        if self.schedule.produces:
            if self.producer.scorer.has_state:
                self.ahead.wait()  # rollouts would change the reward state that is restored after an evaluation
            with self.schedule.gathered_weights():
                groups = self.producer.evaluate(rows, self.eval_size, trainer_state, between)
                produced = Rollout(self.producer.num_rollouts, step, groups)
            if self.section.release_sampler:
                self.release_sampler()
        elif between is not None:
            for _ in self.producer.batches(rows):  # all ranks agree between the calls of the sampler
                between()
        rollout = self._broadcast(produced)
        if self.feature_matching is not None:
            metrics = self.feature_matching.score(rollout.groups, self.eval_size, runner, model)
            metrics["ebft/ce_loss"] = self.feature_matching.cross_entropy(rollout.groups, runner, model)
        else:
            metrics = pass_rates(rollout.groups, names)
        if self.evaluates_loss:
            metrics |= self._loss_of(rollout, runner, model)
        for callback in self.on_evaluation:
            callback(rollout, step, name)
        return summary(rollout.groups, names, method) | metrics

    def _loss_of(self, rollout: Rollout, runner: StepRunner, model: nn.Module) -> dict[str, float]:
        """Return the loss and the metrics of an evaluation's completions."""
        self.producer.add_advantages(rollout.groups)
        units = units_of_groups(rollout.groups, mask_truncated=self.mask_truncated, sampler_logps=False)
        if self.producer.method.needs_kl_in_reward:
            units = self._with_kl_in_reward(rollout, units, runner, model, sampler_logps=False)
        with runner.other_meters() as meters:
            loss, counts = runner.evaluate(model, units)
        total = sum(float(loss.sums[name] / counts[name].clamp(min=1)) for name in loss.sums)
        return {"loss": total, **meters.drain(runner.accelerator)}

    def save(self, folder: Path) -> None:
        """Save the state of the rollouts to a checkpoint."""
        plain = None
        if self.current is not None and self.trained < self.producer.plan.steps_per_rollout:
            plain = to_plain(self.current)
            for name in SAVED_LOGPS:
                known = [[getattr(sample, name) for sample in unit.samples] for unit in self.units]
                plain[name] = [[None if logps is None else logps.tolist() for logps in unit] for unit in known]
        with activity("waiting for the rollouts under way, which the checkpoint holds"):
            ahead = [to_plain(rollout) for rollout in self.ahead.wait()]  # sampled rollouts are kept
        state = {"producer": self.producer.state(), "trained": self.trained, "current": plain, "ahead": ahead}
        write_text(folder / STATE, json.dumps(state))

    def restore(self, folder: Path) -> None:
        """Restore the state of the rollouts from a checkpoint."""
        if not (folder / STATE).is_file():
            raise UserError(f"resume_from_checkpoint: {folder} has no {STATE}: no run with rollouts wrote it.")
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.producer.restore(state["producer"])
        self.ahead.replace(from_plain(plain, self.producer.rows) for plain in state["ahead"])
        if state["current"] is None:
            self.current = None
            return
        saved_logps = {name: state["current"].pop(name) for name in SAVED_LOGPS if name in state["current"]}
        self._start_rollout(from_plain(state["current"], self.producer.rows), state["trained"])
        for name, known in saved_logps.items():
            self.units = [
                unit if None in logps else _with_logps(unit, name, [np.array(one, np.float32) for one in logps])
                for unit, logps in zip(self.units, known, strict=True)
            ]

    def close(self) -> None:
        """Stop the producing thread, the reward processes, the episode runner and the sampler."""
        self.ahead.close()
        self.producer.scorer.close()
        self.producer.completion_source.close()
        if self.generator is not None:
            self.generator.close()
        self.synced = None

    def units_of_step(self, ago: int) -> list[Unit]:
        """Return the units that were trained on so many steps ago (the last step: 1); none of an earlier rollout."""
        plan, number = self.producer.plan, self.trained - ago
        start = number % plan.steps_per_pass * plan.step_size
        return self.units[start : start + plan.step_size] if number >= 0 else []

    def old_logps(self) -> list[list[float] | None]:
        """Return the old log-probs of each completion of the current rollout; None where they were not computed."""
        samples = (unit.samples[0] if len(unit.samples) == 1 else None for unit in self.units)
        return [None if one is None or one.old_logps is None else one.old_logps.tolist() for one in samples]

    def _start_rollout(self, rollout: Rollout, done: int, runner: StepRunner | None = None, model: Any = None) -> None:
        """Make this the current rollout, of which `done` steps are trained: build units, counts and old log-probs."""
        plan, method = self.producer.plan, self.producer.method
        self.current, self.trained = rollout, done
        make = units_of_groups if self.feature_matching is None else self.feature_matching.units
        self.units = make(rollout.groups, mask_truncated=self.mask_truncated, sampler_logps=self.sampler_logps)
        self.demonstrations = []
        if self.feature_matching is not None and self.feature_matching.method.ce_coef:
            self.demonstrations = self.feature_matching.demonstrations(rollout.groups)
        totals = method.count(count_batch(self.units))
        self.counts = {
            name: float(total) / plan.steps_per_pass for name, total in totals.items() if name.startswith("rollout_")
        }
        if runner is not None and method.needs_kl_in_reward:
            self.units = self._with_kl_in_reward(rollout, self.units, runner, model, sampler_logps=self.sampler_logps)
        if runner is not None and runner.teachers is not None and method.teacher_advantage:
            self._add_teacher_to_advantages(runner, runner.teachers, model, method.teacher_advantage)
        keeps_old = not self.section.replay_recompute and any(group.replayed for group in rollout.groups)
        if runner is None or method.strided or not (plan.steps_per_rollout > 1 or keeps_old):
            return
        with dropout_off(model):
            policy_logps = runner.logps(model, self.units, replays=True)
        for index, (unit, logps) in enumerate(zip(self.units, policy_logps, strict=True)):
            # Old log-probs of a replayed sample are those of the sampler that wrote it.
            sampler_logps = [one.sampler_logps for one in unit.samples if one.sampler_logps is not None]
            kept = keeps_old and rollout.groups[unit.group].replayed and len(sampler_logps) == len(unit.samples)
            self.units[index] = _with_logps(unit, "old_logps", sampler_logps if kept else logps)

    def _with_kl_in_reward(
        self, rollout: Rollout, units: Sequence[Unit], runner: StepRunner, model: Any, *, sampler_logps: bool
    ) -> list[Unit]:
        """Recompute the advantages with the policy's log-ratio to the reference, whose log-probs the units keep."""
        assert runner.reference is not None
        with dropout_off(model):
            policy_logps = runner.logps(model, units, replays=True)
            with runner.reference.use(model) as reference:
                ref_logps = runner.logps(reference, units)
        log_ratios = [
            sum(float((policy - ref).sum()) for policy, ref in zip(*parts, strict=True))
            for parts in zip(policy_logps, ref_logps, strict=True)
        ]
        self.producer.add_advantages(rollout.groups, log_ratio_S=torch.tensor(log_ratios, dtype=torch.float64))
        units = units_of_groups(rollout.groups, mask_truncated=self.mask_truncated, sampler_logps=sampler_logps)
        return [_with_logps(unit, "ref_logps", logps) for unit, logps in zip(units, ref_logps, strict=True)]

    def _add_teacher_to_advantages(
        self, runner: StepRunner, teachers: Teachers, model: nn.Module, weight: float
    ) -> None:
        """Add the teacher's log-prob over the sampler's to the advantage of each token, after all normalisation."""
        assert self.current is not None
        sampled = units_of_groups(self.current.groups, mask_truncated=self.mask_truncated, sampler_logps=True)
        sampler = [[sample.sampler_logps for sample in unit.samples] for unit in sampled]
        with dropout_off(model):
            if any(logps is None for unit in sampler for logps in unit):  # a sampler that does not report them
                computed = runner.logps(model, self.units, replays=True)
                sampler = [
                    [now if then is None else then for then, now in zip(*logps, strict=True)]
                    for logps in zip(sampler, computed, strict=True)
                ]
            drawn = [[np.asarray(logps) for logps in unit] for unit in sampler]
            of_units = teachers.gaps(model, self.units, drawn, runner.logps)
        gaps: list[NDArray[np.float32]] = []
        for index, (unit, each) in enumerate(zip(self.units, of_units, strict=True)):
            parts = zip(unit.samples, each, strict=True)
            advantages = [(_token_advantages(sample) + weight * gap.values).astype(np.float32) for sample, gap in parts]
            self.units[index] = _with_logps(unit, "token_advantages", advantages)
            gaps += [gap.shares for gap in each]
        total = np.concatenate([np.zeros(0, np.float32), *gaps])
        if len(total):  # completions that are too long may all be masked
            runner.meters.add(_as_means({"distill/sampled_kl": -float(total.mean())}, runner.accelerator.device))


class RolloutLoader:
    """The Trainer's loader: yields the remaining steps of an epoch, each fetched on demand."""

    def __init__(self, trainer: Any, num_workers: int) -> None:
        self._trainer, self.dataset = trainer, trainer.rollouts.producer.rows
        self.num_workers = num_workers  # as scripts ask for it; the prompts of a rollout are a few rows, read in place

    def __len__(self) -> int:
        return self._trainer.rollouts.steps_per_epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        trainer = self._trainer
        for _ in range(trainer.state.global_step % len(self), len(self)):
            yield trainer.rollouts.next_step(trainer.runner, trainer.model_wrapped, trainer.state)


class SaveRollouts(TrainerCallback):
    """Saves the state of the rollouts to each checkpoint."""

    def __init__(self, rollouts: RolloutFeed) -> None:
        self.rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.rollouts.save(folder)


def _token_advantages(sample: Sample) -> NDArray[np.float32]:
    """Return the advantages of a sample's scored tokens."""
    if sample.token_advantages is not None:
        return sample.token_advantages
    return np.full(int(sample.loss_mask.sum()), sample.advantage or 0.0, np.float32)


def _with_logps(unit: Unit, name: str, logps: Sequence[Any]) -> Unit:
    samples = [dataclasses.replace(one, **{name: values}) for one, values in zip(unit.samples, logps, strict=True)]
    return dataclasses.replace(unit, samples=tuple(samples))


def _with_lag(unit: Unit, step: int) -> Unit:
    """Return a unit whose tokens say how many optimizer steps ago they were sampled."""
    known = [(one, step - one.versions) for one in unit.samples if one.versions is not None]
    return dataclasses.replace(unit, samples=tuple(dataclasses.replace(one, lag=lag) for one, lag in known))


def _as_means(metrics: Mapping[str, float], device: torch.device) -> dict[str, Mean]:
    one = torch.ones((), device=device, dtype=torch.float64)
    return {name: Mean(one * value, one) for name, value in metrics.items()}
