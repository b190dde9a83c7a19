"""Record a training in its run folder: the resolved config, a line of metrics per log, and the callbacks of a run."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from transformers import EarlyStoppingCallback, TrainerCallback

from upweight.config import Config
from upweight.config.config import SECTIONS
from upweight.config.redact import redacted
from upweight.config.sections.rollout import RolloutSection
from upweight.config.sections.run import RunSection, TrackingSection
from upweight.errors import UserError
from upweight.files import write_text
from upweight.log import shows_status
from upweight.runs.files import CONFIG, METRICS, metrics_of
from upweight.runs.record import about, recorded
from upweight.settings import Section, keys_of
from upweight.train.objects import YAML_ONLY, Objects
from upweight.train.online.completions import CompletionFiles, ShownCompletions, cut_completions
from upweight.train.online.feed import SaveRollouts
from upweight.train.recording.callbacks import (
    BeforeAndAfter,
    HealthCallback,
    LossLimit,
    Profiler,
    Progress,
    StopOnNan,
    StopOnSignal,
)
from upweight.train.recording.checkpoints import KeepCheckpoints, SaveFirstStep

TRAINED = (  # keys that decide which weights are trained, and the optimizer states
    *("adapter", "lora_r", "lora_rank_pattern", "lora_target_modules", "lora_target_linear", "lora_target_parameters"),
    *("lora_modules_to_save", "peft_layers_to_transform", "peft_layers_pattern", "peft_use_dora"),
    *("peft_init_lora_weights", "unfrozen_parameters", "reward_model", "process_reward_model", "optimizer"),
    *("tokens", "resize_token_embeddings_to_32x"),  # not base_model, whose folder may have moved
)
LOOK_EVERY = 50  # steps between looks at completions on a terminal, where the config does not ask for them
FOLDED = ("batch_size",)  # keys that are resolved into other keys


def write_config(config: Config, folder: Path) -> None:
    """Write the config with every default filled in, as YAML that repeats the run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, yaml.safe_dump(content_of(config), sort_keys=False, allow_unicode=True))


def changed_keys(config: Config, folder: Path) -> list[str]:
    """Return the keys that affect training and have changed since the run in `folder` started."""
    if not (folder / CONFIG).exists():
        return []
    before = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    now = yaml.safe_load(yaml.safe_dump(content_of(config)))
    added = [key for key in now if key not in before]  # by a later version, with the default unless it is set
    unset = [key for key in added if not any(path.split(".")[0] == key for path in config.set_keys)]
    paths = [key.path for section in (RunSection, TrackingSection) for key in keys_of(section)]
    return [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in (*paths, *unset)]


def refuse_other_weights(changed: Iterable[str], checkpoint: Path | None, scheduler: str) -> None:
    """Raise where changed keys do not fit the weights, optimizer or learning rate of the checkpoint."""
    if "learning_rate" in changed and scheduler == "reduce_lr_on_plateau":
        raise UserError(
            f"resume: learning_rate set otherwise than when the run began, and with 'reduce_lr_on_plateau' the rate is "
            f"what {checkpoint} says it has come to. Set it as in the run's config.yaml, or begin a new run."
        )
    if keys := [key for key in changed if key in TRAINED]:
        raise UserError(
            f"resume: {', '.join(keys)} set otherwise than when the run began, and {checkpoint} holds what was trained "
            "then. Set it as in the run's config.yaml, or begin a new run in another output_dir."
        )


def content_of(config: Config) -> dict[str, Any]:
    """Return every value that the run reads, nested by YAML key, without credentials."""
    off = set() if config.method.online else {"rollout", "vllm", "gym", "environment"}
    content: dict[str, Any] = {}
    for name in (name for name in (*SECTIONS, "method") if name not in off):
        for path, value in _set_values(getattr(config, name)):
            if name == "environment" and path not in config.set_keys:  # kinds of environments refuse others' keys
                continue
            *blocks, last = path.split(".")
            place = content
            for block in blocks:
                place = place.setdefault(block, {})
            place[last] = value
    for row in (*content.get("datasets", ()), *content.get("test_datasets", ())):
        if row.get("path") and (config.folder / row["path"]).exists():  # the copy lies in another folder
            row["path"] = str((config.folder / row["path"]).resolve())
    idle = (
        *(("lora", "peft") if config.adapter.kind is None else ()),
        *(("fsdp",) if not config.sharding.fsdp else ()),
        *(("sequence_len",) if config.method.online and not config.method.strided else ()),
    )
    return redacted({key: value for key, value in content.items() if not key.startswith(idle)})


def _set_values(section: Section) -> Iterator[tuple[str, Any]]:
    """Yield the YAML path and the value of every key of a section that has a value."""
    for key in keys_of(type(section)):
        # Values of a script's arguments may have other types than the key.
        shown = section.model_dump(mode="json", exclude_none=True, include={key.name}, warnings=False)
        if key.path == key.canonical and key.path not in FOLDED and shown.get(key.name) not in (None, {}, []):
            yield key.path, shown[key.name]


def cut_metrics(folder: Path, step: int) -> None:
    """Delete the metrics after `step` and an incomplete last line."""
    if (folder / METRICS).exists():
        kept = [row for row in metrics_of(folder) if row.get("step", 0) <= step]
        write_text(folder / METRICS, "".join(json.dumps(row) + "\n" for row in kept))


class MetricsFile(TrainerCallback):
    """Appends one flat JSON object for each log; a training first deletes what was written after its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            cut_metrics(self.folder, state.global_step or -1)
            cut_completions(self.folder, state.global_step or -1)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (line := _line(kwargs["logs"], state)) is not None:
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")


class MetricsOut(TrainerCallback):
    """Prints the same JSON to standard output, for other programs."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (line := _line(kwargs["logs"], state)) is not None:
            print(line, flush=True)


def _line(logs: Mapping[str, Any], state: Any) -> str | None:
    """Return a log as JSON, which has no NaN and infinity; None on other ranks and for the Trainer's final summary."""
    if not state.is_world_process_zero or "train_runtime" in logs:
        return None
    odd = {name: str(value) for name, value in logs.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps({"step": state.global_step, **logs, **odd})


@contextmanager
def recording(
    trainer: Any, config: Config, objects: Objects = YAML_ONLY, watchers: Sequence[TrainerCallback] = ()
) -> Iterator[StopOnSignal]:
    """Record one training: metrics, health, checkpoints, signals and how it ended; `watchers` are further callbacks."""
    folder, stop = Path(config.run.output_dir), StopOnSignal()
    keep = KeepCheckpoints(config.run.save_total_limit, trainer.data_digest)
    callbacks = [*_callbacks(config, objects, trainer, stop), *watchers, keep]
    record = about(trainer)
    if objects.from_script:
        names = None if trainer.rollouts is None else list(trainer.rollouts.producer.names)
        rollout = config.rollout.model_copy(update={} if names is None else {"reward_funcs": names})
        record["settings"] = content_of(dataclasses.replace(config, rollout=rollout))
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        with recorded(folder, record, writes=trainer.is_world_process_zero()):
            try:
                yield stop
            except UserError as error:
                raise UserError(objects.translate_error(str(error))) from error
            finally:
                stop.restore()
            if objects.from_script:  # whose process ends after a signal
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
    callbacks: list[TrainerCallback] = [stop, *([SaveFirstStep()] if run.save_first_step else [])]
    callbacks += [MetricsFile(folder), *([] if objects.from_script else [Progress(bar=shows_status())])]
    callbacks += [HealthCallback(folder), StopOnNan(trainer.rows_of_step)]
    if run.loss_limit is not None:
        callbacks.append(LossLimit(run.loss_limit, run.loss_limit_patience))
    if run.patience is not None:
        callbacks.append(EarlyStoppingCallback(run.patience))
    if run.profiler_steps is not None:
        callbacks.append(Profiler(folder, run.profiler_steps, run.profiler_start))
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
    if section.log_completions:
        rollouts.on_rollout.append(ShownCompletions(every, section.completions_shown or 4, names, decode))
    elif shows_status():  # a look now and then
        every = max(every, LOOK_EVERY)
        rollouts.on_rollout.append(ShownCompletions(every, section.completions_shown or 2, names, decode))
