"""`upweight train` and `upweight evaluate`: in one process, as launcher of ranks, or as one rank."""

import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from upweight.cli.inputs import ADAPTER, load_with_notices
from upweight.config import Config
from upweight.config.yaml_file import read_yaml
from upweight.errors import UserError
from upweight.log import logger, quiet_transformers
from upweight.runs.checkpoints import DATA, checkpoints_of
from upweight.runs.files import METRICS, read_json
from upweight.train.distributed.launch import Start, end_with_launcher, is_rank, launch, say_through_launcher


def run_train(
    path: Path, overrides: list[str], *, resume: bool, start: Start, stage: int | None, quiet: bool, as_json: bool
) -> None:
    """Train what a config describes, or one of its stages; `quiet` and `as_json` leave only warnings on stderr."""
    if quiet or as_json:
        logger.setLevel(logging.WARNING)
    config = _load_config(path, overrides)
    options = [option for option, wanted in (("--quiet", quiet), ("--json", as_json)) if wanted]

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

    if stage is not None or not config.stages:
        train_one(stage, resume)
        return
    if is_rank():
        raise UserError("stages: start the command by itself; it starts the ranks of each stage (--num-processes).")
    from upweight.train.stages import train_stages

    train_stages(config, train_one, resume=resume or config.run.auto_resume)


def run_evaluate(path: Path, overrides: list[str], *, start: Start) -> None:
    """Print the metrics of a config's model on its evaluation data as one JSON object."""
    config = _load_config(path, overrides)
    code = _launch_ranks(["evaluate", str(path), *overrides], start)
    if code is not None:
        sys.exit(code)
    with _as_one_of_many():
        from upweight.train.run import evaluate

        _warn_if_untrained(config)
        metrics = evaluate(config)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(metrics))


def _warn_if_untrained(config: Config) -> None:
    """Warn that the initial model is evaluated if a trained one exists."""
    folder, compares = Path(config.run.output_dir), config.method.needs_reference
    if (folder / ADAPTER).is_file() and config.adapter.folder is None:
        remedy = f"for the result, add: lora_model_dir={folder}" + (" rl_adapter_ref_model=true" if compares else "")
    elif (folder / "config.json").is_file() and Path(config.model.base_model or "") != folder:
        remedy = f"its metrics are in {folder / METRICS}" if compares else f"for the result, add: base_model={folder}"
    else:
        return
    logger.warning("this evaluates the model before training; %s", remedy)


def _load_config(path: Path, overrides: list[str]) -> Config:
    if os.environ.get("RANK", "0") != "0":
        logger.setLevel(logging.ERROR)  # only rank 0 logs
    try:
        return load_with_notices(path, overrides)
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
        raise UserError(f"--num-processes {processes}: only {gpus} GPUs are visible, and each process needs one.")
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
