"""`upweight train` and `upweight evaluate`: alone, as the launcher of several ranks, or as one of them."""

import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from upweight.config import Config, load_config
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.train.launch import end_with_launcher, is_rank, launch, say_through_launcher


def run_train(
    path: Path, overrides: list[str], *, resume: bool, processes: int | None, stage: int | None = None
) -> None:
    """Train what a config describes; where it has stages, all of them or the one with that number."""
    config = _config(path, overrides)
    arguments = ["train", str(path), *overrides]
    if config.stages and stage is None:
        _train_stages(config, arguments, resume or config.run.auto_resume, processes)
        return
    if stage is not None:
        config, arguments = config.stages[stage], [*arguments, "--stage", str(stage)]
    _launch([*arguments, *(["--resume"] if resume else [])], processes)
    _train(config, resume=resume)


def _train(config: Config, *, resume: bool) -> None:
    with _as_one_of_many():
        from upweight.train.run import train

        train(config, resume=resume)


def _train_stages(config: Config, arguments: list[str], resume: bool, processes: int | None) -> None:
    """Every stage with ranks of its own, or in this process where one is enough."""
    if is_rank():
        raise UserError("stages: start the command by itself; it starts the ranks of each stage (--num-processes).")
    from upweight.train.stages import train_stages

    def run_stage(number: int, again: bool) -> None:
        code = _launched([*arguments, "--stage", str(number), *(["--resume"] if again else [])], processes)
        if code is None:
            _train(config.stages[number], resume=again)
            gc.collect()  # the next stage's model needs the memory of this one's
        elif code:
            sys.exit(code)

    train_stages(config, run_stage, resume=resume)


def run_evaluate(path: Path, overrides: list[str], *, processes: int | None) -> None:
    """Print the metrics of a config's model on its evaluation data as one JSON object."""
    config = _config(path, overrides)
    _launch(["evaluate", str(path), *overrides], processes)
    with _as_one_of_many():
        from upweight.train.run import evaluate

        metrics = evaluate(config)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(metrics))


def _config(path: Path, overrides: list[str]) -> Config:
    if os.environ.get("RANK", "0") != "0":
        logger.setLevel(logging.ERROR)  # rank 0 speaks for all
    config = load_config(path, overrides)
    for notice in config.notices:
        warn_once(notice)
    return config


def _launch(arguments: Sequence[str], processes: int | None) -> None:
    """Start so many ranks and end with their exit code; return where one process, this one, is enough."""
    code = _launched(arguments, processes)
    if code is not None:
        sys.exit(code)


def _launched(arguments: Sequence[str], processes: int | None) -> int | None:
    """The exit code of so many ranks; None where one process, this one, is enough."""
    if is_rank():
        return None
    import torch

    gpus = torch.cuda.device_count()
    processes = processes or max(gpus, 1)
    if gpus and processes > gpus:
        raise UserError(f"--num-processes {processes}: only {gpus} GPUs are visible, and each process needs its own.")
    if processes > 1:
        return launch(arguments, processes)
    if gpus > 1:  # the Trainer would spread one process over all it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return None


@contextlib.contextmanager
def _as_one_of_many() -> Iterator[None]:
    """Quiet libraries; errors and interrupts end a rank so that a person reads one message."""
    end_with_launcher()
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # about how these libraries call each other
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    except UserError as error:
        say_through_launcher(str(error))
        raise
    except KeyboardInterrupt:
        sys.exit(130)
