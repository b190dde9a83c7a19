"""Callbacks of every run: stops on a signal or NaN, health, progress, whole checkpoints, those that keys ask for."""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import PartialState
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from upweight.callbacks import callbacks_of
from upweight.config import Config
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import clear_status, in_parts, logger, show_status, shows_status
from upweight.models.precision import ComputeCopies
from upweight.runs.checkpoints import DATA, WHOLE, checkpoints_of, mark_whole, newest_marked
from upweight.runs.command import OPTION, resume_advice, resume_from, resume_words
from upweight.runs.files import HEALTH, metrics_of
from upweight.runs.health import Health, Verdict
from upweight.runs.report.reading import columns
from upweight.runs.report.run import first_and_last
from upweight.train.distributed.ranks import all_gather_objects, broadcast_from_rank0
from upweight.train.experts.record import ExpertLoads
from upweight.train.loader import SaveFeed
from upweight.train.objects import Objects
from upweight.train.online.feed import SaveRollouts
from upweight.train.recording.completions import CompletionFiles, ShownCompletions
from upweight.train.recording.held_out_answers import HeldOutAnswers
from upweight.train.recording.metrics import MetricsFile
from upweight.train.recording.samples import samples_of_step
from upweight.train.recording.start_summary import StartSummary
from upweight.user_modules import CODE

SHOWN_METRICS = ("reward", "group_reward_std", "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen",
         "rewards/rejected", "accuracy", "mean_token_accuracy",
         "kl", "entropy", "completions/mean_length", "grad_norm")  # fmt: skip
BAR_WIDTH = 24  # characters
LOOK_EVERY = 50  # steps between looks at completions on a terminal, where the config does not ask for them
NAN_BATCH = "nan_batch.jsonl"
RESUME = "resume_from_checkpoint=True"
GREEDY = "GreedyLR"  # of transformers, whose older versions have none


class EvaluationLeft(Exception):
    """A signal came during an evaluation, which is left."""


class StopOnSignal(TrainerCallback):
    """On SIGTERM or Ctrl-C, saves a checkpoint after the current step and stops; a second signal ends it at once.

    A notebook or an interpreter outlives the run: there Ctrl-C, or the button that interrupts a cell, ends the call.
    """

    def __init__(self) -> None:
        self.caught, self._process = 0, os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._strategy: tuple[Any, Any] | None = None  # arguments whose `save_strategy` is changed, and what it was

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.getsignal(number)  # before a signal can come in between
                signal.signal(number, self._on_signal)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.caught = max(all_gather_objects(self.caught))  # a signal reaches the ranks at different times
        if self.caught:
            control.should_save = control.should_log = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.caught and state.epoch != int(state.epoch):  # stopped in the middle of an epoch
            control.should_save = control.should_evaluate = False

    def leave_evaluation(self, trainer: Any) -> None:
        """Save, stop and raise where a signal was caught; an evaluation that decides a learning rate goes on."""
        self.caught = max(all_gather_objects(self.caught))
        by_metric = isinstance(trainer.lr_scheduler, ReduceLROnPlateau) or type(trainer.lr_scheduler).__name__ == GREEDY
        if self.caught and not by_metric:
            best = trainer.args.metric_for_best_model
            uncounted = "" if best is None else f", so these weights are not compared by {best}"
            logger.warning("the evaluation at step %d is left%s", trainer.state.global_step, uncounted)
            trainer.control.should_save = trainer.control.should_training_stop = True
            trainer.control.should_evaluate = False
            # By "best", the Trainer would save only what this evaluation shows to be better.
            self._strategy = trainer.args, trainer.args.save_strategy
            trainer.args.save_strategy = SaveStrategy.STEPS
            raise EvaluationLeft

    def restore(self) -> None:
        """Restore the signal handlers of before the training, and what a signal has changed."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._strategy is not None:
            arguments, arguments.save_strategy = self._strategy
            self._strategy = None

    def exit_if_signalled(self, state: Any) -> None:
        """Leave the run as the signal asks, if one was caught; call it once the checkpoint is written."""
        if self.caught and _keeps_process(self.caught):
            raise KeyboardInterrupt(f"stopped at step {state.global_step}, which is saved; continue with {RESUME}")
        if self.caught:
            words = resume_words()
            words = RESUME if words == OPTION else words  # a script, which no command started
            logger.warning("stopped at step %d; continue with %s", state.global_step, words)
            sys.exit(128 + self.caught)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked loader process
            return
        if self.caught and _keeps_process(number):
            self.restore()
            raise KeyboardInterrupt
        if self.caught:
            advice = resume_advice().replace(OPTION, RESUME) if resume_words() == OPTION else resume_advice()
            logger.warning("ended at once, without saving; %s", advice)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.caught = number
        name, again = signal.Signals(number).name, "a second signal ends it"
        if _keeps_process(number):
            name, again = "interrupted", "a second interrupt ends it"
        logger.warning("%s: saving after this step, then stopping; %s at once, without saving", name, again)


def _keeps_process(number: int) -> bool:
    """Whether a signal ends only what is running: Ctrl-C where a person types, as in a notebook."""
    return number == signal.SIGINT and hasattr(sys, "ps1")


class StopOnNan(TrainerCallback):
    """Stops the run when the loss or the gradient norm is not finite, before such weights are saved."""

    def __init__(self, rows_of: Callable[[int], Iterable[Mapping[str, Any]]], user_code: Sequence[str] = ()) -> None:
        self.rows_of, self.logged = rows_of, 0  # the samples of a step, counted from 0; the last step logged
        self.user_code = user_code  # that may be the reason

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logged = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Logged means must not depend on where a run was interrupted, so each checkpoint also logs.
        control.should_log = control.should_log or control.should_save or control.should_evaluate

    on_epoch_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        # With float16, loss scaling skips a step whose gradients overflow.
        watched = ("loss",) if args.fp16 else ("loss", "grad_norm")
        bad = [name for name in watched if name in logs and not math.isfinite(logs[name])]
        if bad:
            file = Path(args.output_dir) / NAN_BATCH
            if state.is_world_process_zero:
                steps = range(self.logged, state.global_step)
                rows = ({"step": step + 1, **row} for step in steps for row in self.rows_of(step))
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            onward = resume_from(newest_marked(Path(args.output_dir)), resume_words())
            remedy = f"Lower 'learning_rate' or 'max_grad_norm', or mend odd rows; then {onward}"
            if self.user_code:
                code = " and ".join(f"'{name}'" for name in self.user_code)
                guard = "guard its divisions, roots and logarithms (`upweight check-method` tries it)"
                remedy = f"Look first at {code}, code of yours: {guard}. Or {remedy[0].lower()}{remedy[1:]}"
            rows_in = f"the rows of steps {self.logged + 1} to {state.global_step} are in {file}"
            bad_value = f"step {state.global_step}: {bad[0]} is {logs[bad[0]]}"
            raise UserError(f"{bad_value}. Nothing was saved since; {rows_in}. {remedy}.")
        if "loss" in logs:
            self.logged = state.global_step


class PlainModelAfterwards(TrainerCallback):
    """Removes the compute copies after training, so that the model can be merged, moved and copied."""

    def __init__(self, copies: ComputeCopies, *, following: bool) -> None:
        self.copies, self.following = copies, following  # the trainer hooks them to an optimizer that it creates

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.following:
            self.copies.rebuild()
            self.copies.follow(kwargs["optimizer"])
            self.following = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.copies.remove()
        self.following = False


class HealthCallback(TrainerCallback):
    """Logs health warnings during a run, and writes them to `health.jsonl`."""

    def __init__(self, folder: Path, translate: Callable[[str], str] = str) -> None:
        self.folder, self.health, self.translate = folder, Health(), translate  # to a script's words

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replay the metrics of a resumed run, so that its warnings are not logged again."""
        if state.is_world_process_zero:
            earlier = [self._line(verdict) for row in metrics_of(self.folder) for verdict in self.health.take(row)]
            write_text(self.folder / HEALTH, "".join(earlier))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        for verdict in self.health.take({**kwargs["logs"], "step": state.global_step}):
            logger.warning("%s", self.translate(verdict.line()))
            with (self.folder / HEALTH).open("a", encoding="utf-8") as file:
                file.write(self._line(verdict))

    def _line(self, verdict: Verdict) -> str:
        """Return a verdict as a line of the file, which the page reads, and `upweight doctor` for a script."""
        words = {name: self.translate(getattr(verdict, name)) for name in ("meaning", "remedy")}
        return json.dumps({**asdict(verdict), **words}) + "\n"


class Progress(TrainerCallback):
    """Prints a line per log with key metrics, throughput and remaining time; with `bar`, a progress bar."""

    def __init__(self, *, bar: bool = False) -> None:
        self.bar, self.first = bar, (0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.start_step + 1:  # the first step compiles and allocates, so it is not timed
            self.first = (state.global_step, time.perf_counter())
        self._draw_bar(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clear_status()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: Mapping[str, float] = kwargs["logs"]
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        shown = [f"{name.split('/')[-1]} {logs[prefix + name]:.4g}" for name in SHOWN_METRICS if prefix + name in logs]
        if not shown or not state.is_world_process_zero or not state.max_steps:
            return
        if "tokens_per_second" in logs:
            shown += [_speed(logs), *self._time_left(state.global_step, state.max_steps)]
        label = "evaluation" if prefix else "step"
        logger.info("%s", in_parts([f"{label} {state.global_step}/{state.max_steps}", *shown]))
        self._draw_bar(state)

    def _draw_bar(self, state: Any) -> None:
        step, steps = state.global_step, state.max_steps
        if self.bar and state.is_world_process_zero and steps:
            done = BAR_WIDTH * step // steps
            text = [f"[{'#' * done}{'-' * (BAR_WIDTH - done)}]", f"{step}/{steps}", *self._time_left(step, steps)]
            show_status("  ".join(text)[: shutil.get_terminal_size().columns - 1])

    def _time_left(self, step: int, steps: int) -> list[str]:
        """Return the remaining time at the pace since the first step, or an empty list before the second."""
        since, at = self.first
        if since == 0 or step <= since:
            return []
        pace = (time.perf_counter() - at) / (step - since)
        return [f"{duration(pace * (steps - step))} left"]


def _speed(logs: Mapping[str, float]) -> str:
    """Return the tokens a second; where none were trained on, which looks like a hang, those that were sampled."""
    if logs["tokens_per_second"]:
        return f"{logs['tokens_per_second']:.0f} tokens/s"
    sampled = logs.get("rollout/tokens_per_second")
    return "nothing to train on" + (f", sampled {sampled:.0f} tokens/s" if sampled else "")


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


class KeepCheckpoints(TrainerCallback):
    """Marks each checkpoint once all ranks have written it, then deletes the oldest beyond `limit`."""

    def __init__(self, limit: int | None, data_digest: Callable[[], str]) -> None:
        self.limit, self.data_digest = limit, data_digest

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ranks = PartialState()
        ranks.wait_for_everyone()
        run_folder = Path(args.output_dir)
        folder = run_folder / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            write_text(folder / DATA, json.dumps({"train": self.data_digest(), "code": CODE}))
            mark_whole(folder)
            best = state.best_model_checkpoint and Path(state.best_model_checkpoint).resolve()
            beyond = [] if self.limit is None else checkpoints_of(run_folder)[self.limit :]
            for old in (path for _, path in beyond if path.resolve() != best):
                (old / WHOLE).unlink(missing_ok=True)  # a half-deleted folder must not count as complete
                shutil.rmtree(old)
        ranks.wait_for_everyone()


class ConfiguredCallbacks(TrainerCallback):
    """Calls the callbacks of `callbacks.py`, each at the events that it has a method for."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
            methods = [getattr(callback, event) for callback in callbacks if hasattr(callback, event)]
            setattr(self, event, partial(_call_each, methods))


def _call_each(methods: Sequence[Callable[..., None]], *arguments: Any, **kwargs: Any) -> None:
    for method in methods:
        method(*arguments, **kwargs)


class BeforeAndAfter(TrainerCallback):
    """Evaluates after the last step, and logs what has changed since the first evaluation."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.evaluated = folder, -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A run that was ended after its last evaluation has nothing to evaluate when it is resumed.
        rows = metrics_of(self.folder) if state.is_world_process_zero else []
        steps, _ = columns((row for row in rows if row["step"] <= state.global_step), evaluation=True)
        self.evaluated = broadcast_from_rank0(max(steps, default=-1))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = state.global_step >= state.max_steps
        if is_last and args.eval_strategy != "no" and self.evaluated != state.global_step:
            control.should_evaluate = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            for line in before_and_after(metrics_of(self.folder)):
                logger.info("%s", line)


def before_and_after(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return lines that compare each set's first evaluation with its last; none for a set with one evaluation."""
    lines = []
    for held_out in first_and_last(*columns(rows, evaluation=True), known=()):
        name, changes = held_out["set"], held_out["lines"]
        lines.append(f"held out{f' ({name})' if name else ''}, step {changes[0]['first']} -> {changes[0]['last']}:")
        width = max(len(line["metric"]) for line in changes)
        lines += [f"  {line['metric']:<{width}}  {line['before']:.3g} -> {line['after']:.3g}" for line in changes]
    return lines


def build_callbacks(config: Config, objects: Objects, trainer: Any, stop: StopOnSignal) -> list[TrainerCallback]:
    """Return the callbacks of a run. The order counts: request a save, log, complete the checkpoint, mark it."""
    run, folder = config.run, Path(config.run.output_dir)
    callbacks: list[TrainerCallback] = [stop, MetricsFile(folder)]
    callbacks += [] if objects.from_script else [StartSummary(config, trainer), Progress(bar=shows_status())]
    configured = [*callbacks_of(config.callbacks, folder)]
    trainer.metrics_of_callbacks += [callback.metrics for callback in configured if hasattr(callback, "metrics")]
    stop_on_nan = StopOnNan(partial(samples_of_step, trainer), config.method.user_code)
    callbacks += [HealthCallback(folder, objects.translate_error), ConfiguredCallbacks(configured), stop_on_nan]
    if trainer.runner.balance is not None:
        callbacks.append(ExpertLoads(folder, trainer.runner.balance))
    if run.patience is not None:
        callbacks.append(EarlyStoppingCallback(run.patience))
    if run.answered_prompts and trainer.eval_rows is not None:
        callbacks += [HeldOutAnswers(trainer, run, folder), BeforeAndAfter(folder)]
    if trainer.feed is not None and trainer.rollouts is None:
        callbacks.append(SaveFeed(trainer.feed))
    if trainer.rollouts is not None:
        if trainer.is_world_process_zero():
            writes = config.rollout.log_completions or not objects.from_script
            _watch_completions(trainer, config.rollout, folder, writes=writes)
        callbacks += [SaveRollouts(trainer.rollouts), *([] if objects.from_script else [BeforeAndAfter(folder)])]
    return callbacks


def _watch_completions(trainer: Any, section: RolloutSection, folder: Path, *, writes: bool) -> None:
    """Register what writes the completions of rollouts to files and shows some of them."""
    rollouts, every = trainer.rollouts, int(trainer.args.logging_steps)
    names, decode = rollouts.producer.names, rollouts.producer.decode
    if writes:
        files = CompletionFiles(folder, names, decode, rollouts.old_logps)
        rollouts.on_rollout.append(files)
        rollouts.on_evaluation.append(files)
    every, usual = (every, 4) if section.log_completions else (max(every, LOOK_EVERY), 2)
    if section.log_completions or shows_status():
        rollouts.on_rollout.append(ShownCompletions(every, section.completions_shown or usual, names, decode))
