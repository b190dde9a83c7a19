"""`upweight train` and `upweight evaluate`."""

import json
from pathlib import Path

from upweight.config import Config, load_config
from upweight.log import warn_once


def run_train(path: Path, overrides: list[str], *, resume: bool) -> None:
    """Train what a config describes."""
    config = _config(path, overrides)
    from upweight.train.run import train

    train(config, resume=resume)


def run_evaluate(path: Path, overrides: list[str]) -> None:
    """Print the metrics of a config's model on its evaluation data as one JSON object."""
    config = _config(path, overrides)
    from upweight.train.run import evaluate

    print(json.dumps(evaluate(config)))


def _config(path: Path, overrides: list[str]) -> Config:
    config = load_config(path, overrides)
    for notice in config.notices:
        warn_once(notice)
    return config
