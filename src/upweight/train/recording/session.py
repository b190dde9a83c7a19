"""Record a training in its run folder, for `upweight report`, `watch`, `doctor` and a resume."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from upweight.config import Config
from upweight.errors import UserError
from upweight.log import shows_status
from upweight.runs.record import about, recorded
from upweight.train.objects import YAML_ONLY, Objects
from upweight.train.online.before_after import BeforeAndAfter
from upweight.train.online.completions import cut_completions
from upweight.train.online.watch import watch_rollouts
from upweight.train.recording.callbacks import HealthCallback, LossLimit, Progress, StopOnNan, StopOnSignal
from upweight.train.recording.checkpoints import KeepCheckpoints, SaveFirstStep
from upweight.train.recording.profile import Profiler
from upweight.train.recording.run_folder import MetricsFile, content_of, cut_metrics


@contextmanager
def recording(
    trainer: Any, config: Config, objects: Objects = YAML_ONLY, watchers: Sequence[TrainerCallback] = ()
) -> Iterator[StopOnSignal]:
    """Record one training: metrics, health, checkpoints, signals and how it ended; `watchers` are further callbacks.

    After a signal, a script's process exits once the checkpoint is written.
    """
    folder, stop = Path(config.run.output_dir), StopOnSignal()
    keep = KeepCheckpoints(config.run.save_total_limit, trainer.data_digest)
    callbacks = [*_callbacks(config, objects, trainer, stop), *watchers, keep]
    record = about(trainer)
    if objects.from_script:
        record["settings"] = content_of(_with_reward_names(config, trainer))
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        with recorded(folder, record, writes=trainer.is_world_process_zero()):
            try:
                yield stop
            except UserError as error:
                if not objects.from_script:
                    raise
                raise UserError(objects.translate_error(str(error))) from error
            finally:
                stop.restore()
            if objects.from_script:
                stop.exit_if_signalled(trainer.state)
    finally:
        for callback in callbacks:
            if callback in trainer.callback_handler.callbacks:  # a resume replaces some
                trainer.remove_callback(callback)
        if trainer.rollouts is not None:
            trainer.rollouts.on_rollout, trainer.rollouts.on_evaluation = [], []


def _callbacks(config: Config, objects: Objects, trainer: Any, stop: StopOnSignal) -> list[TrainerCallback]:
    """Return the callbacks of a run. The order counts: request a save, log, complete the checkpoint, mark it."""
    run, folder = config.run, Path(config.run.output_dir)
    callbacks: list[TrainerCallback] = [
        _CutRunFolder(folder),
        stop,
        *([SaveFirstStep()] if run.save_first_step else []),
    ]
    callbacks += [MetricsFile(folder), *([] if objects.from_script else [Progress(bar=shows_status())])]
    callbacks += [HealthCallback(folder), StopOnNan(trainer.rows_of_step)]
    if run.loss_limit is not None:
        callbacks.append(LossLimit(run.loss_limit, run.loss_limit_patience))
    if run.patience is not None:
        callbacks.append(EarlyStoppingCallback(run.patience))
    if run.profiler_steps is not None:
        callbacks.append(Profiler(folder, run.profiler_steps, run.profiler_start))
    if trainer.rollouts is not None:
        writes = config.rollout.log_completions or not objects.from_script
        callbacks.append(watch_rollouts(trainer, config.rollout, folder, writes=writes))
        callbacks += [] if objects.from_script else [BeforeAndAfter(folder)]
    return callbacks


def _with_reward_names(config: Config, trainer: Any) -> Config:
    """Return the config with the names of a script's rewards."""
    if trainer.rollouts is None:
        return config
    names = list(trainer.rollouts.producer.names)
    return dataclasses.replace(config, rollout=config.rollout.model_copy(update={"reward_funcs": names}))


class _CutRunFolder(TrainerCallback):
    """Deletes metrics and completions after the step at which a training starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            cut_metrics(self.folder, state.global_step or -1)
            cut_completions(self.folder, state.global_step or -1)
