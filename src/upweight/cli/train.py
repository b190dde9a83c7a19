"""`upweight train` and `upweight evaluate`: in one process, as launcher of ranks, or as one rank."""

import contextlib
import gc
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from upweight.cli.inputs import ADAPTER, load_with_notices, read_config
from upweight.config import Config
from upweight.config.yaml_file import read_yaml
from upweight.errors import UserError
from upweight.log import counted, logger, quiet_transformers
from upweight.runs.checkpoints import DATA, checkpoints_of, refuse_damaged, step_of
from upweight.runs.command import started_by
from upweight.runs.files import CONFIG, METRICS, RECORD, no_such_run, read_json
from upweight.runs.record import TRAINED, earlier_run, require_trained
from upweight.train.distributed.launch import (
    Start,
    end_with_launcher,
    has_launcher,
    is_rank,
    launch,
    say_through_launcher,
)


def run_train(
    path: Path,
    overrides: list[str],
    *,
    resume: bool,
    start: Start,
    stage: int | None,
    quiet: bool,
    as_json: bool,
    overwrite: bool = False,
) -> None:
    """Train what a config describes, or one of its stages; `quiet` and `as_json` leave only warnings on stderr."""
    if quiet or as_json:
        logger.setLevel(logging.WARNING)
    config = _load_config(path, overrides)
    if resume and overwrite:
        raise UserError("--resume continues the run in output_dir, --overwrite replaces it: give one of them")
    if not overwrite and stage is None and start.node_rank == 0:
        _refuse_used_folder(config, resume=resume)
    flags_of = (("--quiet", quiet), ("--json", as_json), ("--overwrite", overwrite))
    options = [option for option, wanted in flags_of if wanted]
    shown = [option for option in options if option != "--overwrite"]

    def train_one(number: int | None, resume_it: bool) -> None:
        """Train a stage, or a config without stages, with ranks or in this process."""
        flags = [] if number is None else ["--stage", str(number)]
        flags += ["--resume"] if resume_it else []
        code = _launch_ranks(["train", str(path), *overrides, *options, *flags], start)
        if code is None:
            with _as_one_of_many():
                from upweight.train.recording.metrics import MetricsOut
                from upweight.train.run import train

                chosen = config if number is None else config.stages[number]
                train(chosen, resume=resume_it, watchers=[MetricsOut()] if as_json else [])
            gc.collect()  # the next stage's model needs the memory of this one's
        elif code:
            sys.exit(code)

    with started_by([str(path), *overrides, *start.options(), *shown], start.extra):
        if stage is not None or not config.stages:
            train_one(stage, resume)
            return
        if is_rank():
            raise UserError("stages: start the command by itself; it starts the ranks of each stage (--num-processes).")
        from upweight.train.stages import train_stages

        train_stages(config, train_one, resume=resume or config.run.auto_resume)


def _refuse_used_folder(config: Config, *, resume: bool) -> None:
    """Raise where a new run would replace the model and metrics of another."""
    if resume or is_rank():  # the process that starts ranks has looked
        return
    for stage in config.stages or (config,):
        folder = Path(stage.run.output_dir)
        goes_on = stage.run.auto_resume or stage.run.resume_from is not None
        if not goes_on and (earlier := earlier_run(folder)) is not None:
            remedy = f"{earlier.ways}; or set another: output_dir=NAME"
            raise UserError(f"output_dir: {folder} holds {earlier.holds}. {remedy}.")


def run_evaluate(target: Path, overrides: list[str], *, start: Start, checkpoint: int | None = None) -> None:
    """Print the metrics of a config's model, or of what a run trained, on its evaluation data as one JSON object."""
    path, weights = target, None
    if not target.exists():
        raise UserError(no_such_run(target, "run or config"))
    if target.is_dir():
        path, weights = _run_to_evaluate(target, checkpoint)
    elif checkpoint is not None:
        raise UserError("--checkpoint: name a run's folder (the output_dir of its config) in place of the config")
    config = _load_config(path, overrides)
    if weights is not None:
        overrides = [*_trained_keys(config, weights), *overrides]
        config = _load_config(path, overrides)
    code = _launch_ranks(["evaluate", str(path), *overrides], start)
    if code is not None:
        sys.exit(code)
    with _as_one_of_many():
        from upweight.train.run import evaluate

        logger.info("evaluates %s", _weights_taken(config))
        metrics = evaluate(config)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(metrics))


def _run_to_evaluate(folder: Path, checkpoint: int | None) -> tuple[Path, Path]:
    """Return the config of a run, and the folder of the weights that are evaluated."""
    run = folder.parent if step_of(folder) is not None else folder
    if not (run / CONFIG).is_file():
        if (run / RECORD).is_file():
            raise UserError(
                f"{run}: a script trained it, without a {CONFIG}. Call trainer.evaluate(rows) in the script."
            )
        remedy = f"Name the output_dir of a run, which holds {CONFIG}, or a config"
        raise UserError(f"{folder}: is no folder of a run. {remedy}.")
    weights = folder if checkpoint is None else run / f"checkpoint-{checkpoint}"
    if not weights.is_dir():
        there = ", ".join(str(step) for step, _ in reversed(checkpoints_of(run))) or "none"
        raise UserError(f"--checkpoint {checkpoint}: {run} has no such checkpoint. Steps there: {there}.")
    refuse_damaged(weights)
    require_trained(weights)
    return run / CONFIG, weights


def _trained_keys(config: Config, weights: Path) -> list[str]:
    """Return the overrides that put the weights of a run in the place of those that it began with."""
    compares = config.method.needs_reference
    if (weights / ADAPTER).is_file():
        return [f"lora_model_dir={weights}", *(["rl_adapter_ref_model=true"] if compares else [])]
    if compares:
        why = f"{config.method.name} compares with the model before training, which trained weights have replaced"
        raise UserError(f"{weights}: {why}. The run's own evaluations are in {weights.parent / METRICS}.")
    return [f"base_model={weights}"]


def _weights_taken(config: Config) -> str:
    """Say which weights are evaluated, and how to evaluate those that the config trained, where there are any."""
    if config.adapter.folder is not None:
        return f"{config.model.base_model} with the adapter in {config.adapter.folder}"
    folder = Path(config.run.output_dir)
    trained = folder.is_dir() and any((folder / name).is_file() for name in TRAINED)
    if Path(config.model.base_model or "") == folder or not trained:
        return str(config.model.base_model)
    named = shlex.quote(str(folder))
    return f"{config.model.base_model}, the model before training; for the result: upweight evaluate {named}"


def _load_config(path: Path, overrides: list[str]) -> Config:
    if os.environ.get("RANK", "0") != "0":
        logger.setLevel(logging.ERROR)  # only rank 0 logs
    try:
        return read_config(path, overrides) if has_launcher() else load_with_notices(path, overrides)
    except UserError as error:
        raise UserError("\n".join([str(error), *_moved_code(path, str(error))])) from error


def _moved_code(path: Path, problem: str) -> Iterator[str]:
    """Yield where the user's code that cannot be found now was, when the run's last checkpoint was written."""
    content = read_yaml(path)
    for _, checkpoint in checkpoints_of(Path(str(content.get("output_dir", "./model-out"))))[:1]:
        for name, was in read_json(checkpoint / DATA).get("code", {}).items():
            if f"'{name.rpartition('.')[0]}'" in problem and not Path(was["file"]).exists():
                yield f"When {checkpoint} was written, '{name}' was in {was['file']}, which is gone: put it back."


def _launch_ranks(arguments: Sequence[str], start: Start) -> int | None:
    """The exit code of ranks; None where one process, this one, is enough."""
    if is_rank():
        return None
    import torch

    gpus = torch.cuda.device_count()
    processes = start.nproc_per_node or (1 if start.launcher == "none" else max(gpus, 1))
    if gpus and processes > gpus:
        raise UserError(f"--num-processes {processes}: {counted(gpus, 'visible GPU')}, and each process needs one.")
    if processes > 1 or start.nodes > 1 or start.launcher in ("torchrun", "accelerate"):
        return launch(arguments, start, processes)
    if gpus > 1:  # the Trainer would spread one process over all it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return None


@contextlib.contextmanager
def _as_one_of_many() -> Iterator[None]:
    """Quiet libraries; errors and interrupts end a rank so that a person reads one message."""
    end_with_launcher()
    quiet_transformers(progress_bars=sys.stderr.isatty())
    warnings.simplefilter("ignore", FutureWarning)  # about how these libraries call each other
    try:
        yield
        from upweight.train.distributed.ranks import leave_ranks

        leave_ranks()
    except UserError as error:
        say_through_launcher(str(error))
        raise
    except KeyboardInterrupt:
        sys.exit(130)
