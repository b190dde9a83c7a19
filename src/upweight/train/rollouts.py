"""The loader of online runs: asks for rollouts and cuts them into steps."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from upweight.engine.check import dropout_off
from upweight.engine.packing import count_batch
from upweight.methods.base import Method
from upweight.rollout.producer import Producer, Rollout, Rows
from upweight.rollout.samples import units_of_groups
from upweight.rollout.store import from_plain, to_plain
from upweight.rollout.summary import pass_rates, summary
from upweight.train.checkpoints import write_text
from upweight.train.step import StepRunner
from upweight.types import Generator, Mean, Unit

STATE = "rollouts.json"


@dataclass
class Rollouts:
    """The rollout under way and how much of it has been trained on."""

    producer: Producer
    method: Method
    generator: Generator | None  # None: a user's function samples from the policy itself
    eval_size: int  # completions for each prompt of an evaluation
    mask_truncated: bool = False
    sampler_logps: bool = False  # train against what the sampler said of its tokens
    skips_idle: bool = True  # leave out completions that cannot contribute
    written: list[Callable[[Rollout, int], None]] = field(default_factory=list)  # told of each rollout and its step
    evaluated: list[Callable[[Rollout, int, str], None]] = field(default_factory=list)  # the same, and the set's name
    current: Rollout | None = None
    trained: int = 0  # steps taken on the current rollout
    units: list[Unit] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every prompt comes up once."""
        return self.producer.plan.steps_per_epoch(len(self.producer.rows))

    def next_step(self, runner: StepRunner, model: nn.Module, state: Any) -> dict[str, Any]:
        """What the next optimizer step trains on, over all ranks."""
        plan = self.producer.plan
        if self.current is None or self.trained >= plan.updates:
            if self.generator is not None:
                self.generator.sync(state.global_step)
            rollout = self.producer.produce(state.global_step, state)
            runner.meters.add(_means(rollout.metrics, runner.accelerator.device))
            for hear in self.written:
                hear(rollout, state.global_step + 1)
            self._take(rollout, 0, runner, model)
        start = self.trained % plan.steps * plan.step
        self.trained += 1
        return {"units": self.units[start : start + plan.step], "counts": self.counts}

    def evaluate(self, rows: Rows, state: Any, name: str = "eval") -> dict[str, float]:
        """Rewards, pass rates and lengths on held-out prompts."""
        if self.generator is not None:
            self.generator.sync(state.global_step)
        groups = self.producer.evaluate(rows, self.eval_size, state)
        names = self.producer.scorer.names
        for hear in self.evaluated:
            hear(Rollout(self.producer.rollouts, state.global_step, groups), state.global_step, name)
        return summary(groups, names, self.method) | pass_rates(groups, names)

    def save(self, folder: Path) -> None:
        """Write to a checkpoint what shapes the steps after it."""
        plain = None
        if self.current is not None and self.trained < self.producer.plan.updates:
            plain = to_plain(self.current)
            plain["old_logps"] = [
                None if (old := unit.samples[0].old_logps) is None else old.tolist() for unit in self.units
            ]
        state = {"producer": self.producer.state(), "trained": self.trained, "current": plain}
        write_text(folder / STATE, json.dumps(state))

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self.producer.restore(state["producer"])
        if state["current"] is None:
            self.current = None
            return
        old = state["current"].pop("old_logps")
        self._take(from_plain(state["current"], self.producer.rows), state["trained"])
        self.units = [
            unit if logps is None else _with_old(unit, torch.tensor(logps).numpy())
            for unit, logps in zip(self.units, old, strict=True)
        ]

    def close(self) -> None:
        """End the processes that compute rewards."""
        self.producer.scorer.close()

    def samples_under_way(self) -> Iterator[dict[str, Any]]:
        """What the rollout under way trains on, for study."""
        for unit in self.units:
            sample = unit.samples[0]
            yield {
                "text": self.producer.decode(sample.ids.tolist()),
                "ids": sample.ids.tolist(),
                "scored": sample.scored.tolist(),
                "advantage": sample.advantage,
            }

    def _take(self, rollout: Rollout, trained: int, runner: StepRunner | None = None, model: Any = None) -> None:
        """Train on this rollout from now on; later steps compare with the policy as it is now."""
        plan = self.producer.plan
        self.current, self.trained = rollout, trained
        self.units = units_of_groups(
            rollout.groups, mask_truncated=self.mask_truncated, sampler_logps=self.sampler_logps
        )
        totals = self.method.count(count_batch(self.units))
        self.counts = {name: float(total) / plan.steps for name, total in totals.items() if name.startswith("rollout_")}
        if runner is not None and plan.updates > 1:
            with dropout_off(model):
                logps = runner.logps(model, self.units)
            self.units = [_with_old(unit, own[0]) for unit, own in zip(self.units, logps, strict=True)]


class RolloutLoader:
    """What the Trainer iterates over: what is left of an epoch's steps, each fetched when it is asked for."""

    def __init__(self, rollouts: Rollouts, next_step: Callable[[], dict[str, Any]], done: Callable[[], int]) -> None:
        self.dataset = rollouts.producer.rows
        self._length = rollouts.steps_per_epoch
        self._next, self._done = next_step, done

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._done() % self._length, self._length):
            yield self._next()


class KeepRollouts(TrainerCallback):
    """Puts the state of the rollouts into each checkpoint."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self.rollouts.save(folder)


def _with_old(unit: Unit, logps: Any) -> Unit:
    sample = dataclasses.replace(unit.samples[0], old_logps=logps)
    return dataclasses.replace(unit, samples=(sample,))


def _means(metrics: Mapping[str, float], device: torch.device) -> dict[str, Mean]:
    one = torch.ones((), device=device, dtype=torch.float64)
    return {name: Mean(one * value, one) for name, value in metrics.items()}
