"""The run folder: the resolved config, what a resumed run may change of it, and the record of a training."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState
from transformers import TrainerCallback, TrainingArguments

from upweight.callbacks import CallbackSection
from upweight.config import Config
from upweight.config.sections.model import AdapterSection
from upweight.config.sections.run import RunSection, TrackingSection
from upweight.config.view import yaml_content
from upweight.errors import UserError, foreign_cause
from upweight.files import write_text
from upweight.log import logger, warn_once
from upweight.runs.checkpoints import DATA, set_aside, step_of
from upweight.runs.files import CONFIG, metrics_of
from upweight.runs.health import verdicts
from upweight.runs.record import about, recorded
from upweight.settings import keys_of
from upweight.train.distributed.ranks import broadcast_from_rank0
from upweight.train.objects import YAML_ONLY, Objects
from upweight.train.recording.callbacks import KeepCheckpoints, StopOnSignal, build_callbacks
from upweight.train.recording.notebook import close_bars, show_metrics_in_notebook
from upweight.train.recording.trackers import name_tracker_errors
from upweight.user_modules import changed_code

SHOWN = 60  # characters of a value in a message
CHANGEABLE = {  # keys of an adapter that a resumed run may change
    "lora_model_dir", "lora_alpha", "lora_alpha_pattern", "lora_dropout", "peft_use_rslora", "loraplus_lr_ratio",
    "loraplus_lr_embedding", "load_in_4bit", "load_in_8bit", "quantize_moe_experts", "bnb_config_kwargs",
    "rl_adapter_ref_model",
}  # fmt: skip
# Keys that decide which weights are trained, and the optimizer states; not base_model, whose folder may have moved.
RESUME_KEYS = {key.path for key in keys_of(AdapterSection)} - CHANGEABLE
RESUME_KEYS |= {"unfrozen_parameters", "reward_model", "process_reward_model", "optimizer", "tokens"}
RESUME_KEYS |= {"resize_token_embeddings_to_32x"}


def write_config(config: Config, folder: Path) -> None:
    """Write the config with every default filled in, as YAML that repeats the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, yaml.safe_dump(yaml_content(config), sort_keys=False, allow_unicode=True))


def changed_keys(config: Config, folder: Path) -> dict[str, str]:
    """Return the keys that affect training and have changed since the run in `folder` started, with both values."""
    if not (folder / CONFIG).exists():
        return {}
    try:
        before = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict):
        warn_once(f"{folder / CONFIG} cannot be read; whether keys changed since the run began is not checked")
        return {}
    now = yaml.safe_load(yaml.safe_dump(yaml_content(config)))
    added = [key for key in now if key not in before]  # by a later version, with the default unless it is set
    unset = [key for key in added if not any(path.split(".")[0] == key for path in config.set_keys)]
    paths = [key.path for section in (RunSection, CallbackSection, TrackingSection) for key in keys_of(section)]
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in (*paths, *unset)]
    return {key: "; ".join(_differences(key, before.get(key), now.get(key))) for key in changed}


def _differences(path: str, before: Any, now: Any) -> Iterator[str]:
    """Yield what differs between two values of a key, each with its path, as it was and as it is."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                yield from _differences(f"{path}.{key}", before.get(key), now.get(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            if old != new:
                yield from _differences(f"{path}[{number}]", old, new)
    else:
        yield f"{path} ({_shown(before)} then, {_shown(now)} now)"


def _shown(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def require_same_resume_keys(changed: Mapping[str, str], checkpoint: Path | None, scheduler: str) -> None:
    """Raise where changed keys do not fit the weights, optimizer or learning rate of the checkpoint."""
    remedy = "Set it as in the run's config.yaml, or begin a new run in another output_dir."
    since = "changed since the run began"
    if "learning_rate" in changed and scheduler == "reduce_lr_on_plateau":
        problem = f"resume: {changed['learning_rate']} {since}; 'reduce_lr_on_plateau' goes on from {checkpoint}"
        raise UserError(f"{problem}. {remedy}")
    if values := [value for key, value in changed.items() if key in RESUME_KEYS]:
        raise UserError(f"resume: {'; '.join(values)} {since}; {checkpoint} holds what was trained then. {remedy}")


def require_steps_left(checkpoint: Path | None, max_steps: int | None) -> None:
    """Raise where `max_steps` ends the run before the step of the checkpoint."""
    step = step_of(checkpoint) if checkpoint else None
    if step is not None and max_steps is not None and max_steps < step:
        remedy = f"Set max_steps above {step}, or begin a new run in another output_dir"
        raise UserError(f"resume: max_steps: {max_steps} was passed before {checkpoint}. {remedy}.")


def require_same_data(checkpoint: Path, data_digest: Callable[[], str], *, allowed: bool) -> None:
    """Raise on all ranks where the training rows are not those of the checkpoint, unless that is allowed."""
    stored = checkpoint / DATA  # which a checkpoint may lack
    content = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    for sentence in changed_code(content.get("code", {})):
        warn_once(f"resume: {sentence}; {checkpoint} was trained with the code as it was")
    before = content.get("train")
    if before is None:
        warn_once(f"{checkpoint} holds no hash of its data; whether the data changed is not checked")
    elif not allowed and not broadcast_from_rank0(PartialState().is_main_process and before == data_digest()):
        allow = "--allow-changed-data (allow_changed_data: true; in a script allow_changed_data=True)"
        remedy = f"Restore it and the keys that shape it, use {allow}, or begin a new run in another output_dir"
        raise UserError(f"resume: the training data is not what {checkpoint} was trained on. {remedy}.")


@contextmanager
def recording(
    trainer: Any,
    checkpoint: Path | None,
    config: Config,
    objects: Objects = YAML_ONLY,
    watchers: Sequence[TrainerCallback] = (),
) -> Iterator[StopOnSignal]:
    """Record one training: metrics, health, checkpoints, signals and how it ended; `watchers` are further callbacks."""
    folder, stop = Path(config.run.output_dir), StopOnSignal()
    resumed = (step_of(checkpoint) or 0) if checkpoint else 0
    if trainer.is_world_process_zero():
        set_aside(folder, resumed)
    keep = KeepCheckpoints(config.run.save_total_limit, trainer.data_digest)
    callbacks = [*build_callbacks(config, objects, trainer, stop), *watchers, keep]
    record = about(trainer) | {"config_folder": str(config.folder.resolve()), "resumed_step": resumed}
    if objects.from_script:
        names = None if trainer.rollouts is None else list(trainer.rollouts.producer.names)
        rollout = config.rollout.model_copy(update={} if names is None else {"reward_funcs": names})
        record["settings"] = yaml_content(dataclasses.replace(config, rollout=rollout))
    _warn_of_changed_arguments(objects, trainer)
    show_metrics_in_notebook(trainer)
    before, trainer.between_batches = trainer.between_batches, partial(stop.leave_evaluation, trainer)
    for callback in callbacks:
        trainer.add_callback(callback)
    if not objects.from_script:  # a script has its trackers' errors as they are
        name_tracker_errors(trainer, config.set_keys)
    try:
        with recorded(folder, record, writes=trainer.is_world_process_zero()):
            with _errors_in_short(stop, objects):
                yield stop
                _warn_if_finished_before(trainer.state, checkpoint, objects)
            if objects.from_script:  # whose process ends after a signal
                stop.exit_if_signalled(trainer.state)
    finally:
        trainer.between_batches = before
        close_bars(trainer.callback_handler.callbacks)
        for callback in callbacks:
            if callback in trainer.callback_handler.callbacks:  # a resume replaces some
                trainer.remove_callback(callback)
        if trainer.rollouts is not None:
            trainer.rollouts.on_rollout, trainer.rollouts.on_evaluation = [], []


@contextmanager
def _errors_in_short(stop: StopOnSignal, objects: Objects) -> Iterator[None]:
    """Raise errors in words of a script, and a second interrupt without the frames of a step; restore the handlers."""
    try:
        yield
    except KeyboardInterrupt:
        if not stop.caught:
            raise
        raise KeyboardInterrupt("ended at once, without saving") from None
    except UserError as error:
        if not objects.from_script:
            raise
        raise UserError(objects.translate_error(str(error))) from foreign_cause(error)
    finally:
        stop.restore()


def _changed_on_trainer(trainer: Any) -> list[str]:
    """Return the method's arguments that a script has set on `trainer` or in `trainer.args` since it was made."""
    args, (before, attributes) = trainer.args, trainer.made_with
    general = {one.name for one in dataclasses.fields(TrainingArguments)}  # of which the loop reads some while it runs
    own = [one.name for one in dataclasses.fields(args) if one.name not in general]
    in_args = [name for name in own if getattr(args, name) != before[name]]
    return in_args + [name for name in own if name in vars(trainer) and name not in attributes]


def _warn_of_changed_arguments(objects: Objects, trainer: Any) -> None:
    """Warn where a script changed arguments of its trainer after it was made, which reads them then."""
    if names := ", ".join(dict.fromkeys([*objects.changed_arguments(), *_changed_on_trainer(trainer)])):
        problem = "changed after the trainer was made, which reads them then: no effect"
        logger.warning("warning: args: %s %s; make the trainer again", names, problem)


def _warn_if_finished_before(state: Any, checkpoint: Path | None, objects: Objects) -> None:
    """Warn where a script resumed a run that has no step left."""
    if not objects.from_script or checkpoint is None:
        return
    if state.global_step == step_of(checkpoint) and state.global_step >= state.max_steps:
        done = f"this run is finished (step {state.global_step} of {state.max_steps}), and nothing was left to train"
        logger.warning("warning: %s: its loss is returned; raise max_steps or num_train_epochs to go on", done)


def named_verdicts(folder: Path) -> str:
    """Return the names of what the health rules report about a run, alarms first; nothing where all is well."""
    alarms_first = sorted(verdicts(metrics_of(folder)), key=lambda verdict: verdict.level != "alarm")
    return ", ".join(dict.fromkeys(f"{verdict.level} '{verdict.name}'" for verdict in alarms_first))
