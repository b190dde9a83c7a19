"""`upweight validate`: all that is wrong with a config, its data files and its model's folder, at once."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from upweight.cli.inputs import load_with_notices
from upweight.config import Config, ConfigError
from upweight.config.rules import NOT_VALIDATED
from upweight.config.rules.feeds import COUNTED, UNKNOWN_LENGTH, without_end
from upweight.config.zero import unread_options
from upweight.data.sources.first_look import data_problems
from upweight.data.sources.lookup import cannot_be_on_hub, existing, file_suffix
from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.models.first_look import model_problems
from upweight.rewards.first_look import reward_problems

FILES: tuple[Callable[[Config], Iterable[str]], ...] = (data_problems, unread_options, model_problems, reward_problems)


def run(path: Path, overrides: list[str], *, fragment: bool, data: bool) -> None:
    """Print ok, or raise with every error; warnings come first."""
    problems: list[str] = []
    try:
        configs: tuple[Config, ...] = (
            load_with_notices(path, overrides, fragment=fragment, asks_hub=False, whole=True),
        )
    except ConfigError as error:
        problems, configs = [str(error)], error.drafts
    for config in configs:
        problems += _reward_specs(config)
    looks = data and not fragment
    missing = [problem for config in configs for check in FILES for problem in check(config)] if looks else []
    if problems or missing:
        remedy = ["(where another machine has the files: --no-data)"] if missing else []
        raise UserError("\n".join(dict.fromkeys([*problems, *missing, *remedy])))
    if looks and (unknown := [text for config in configs for text in _unknown_lengths(config)]):
        raise UserError("\n".join(dict.fromkeys(unknown)))
    if looks:
        seen = "the names in the first row of each local file, and none of the hub; all rows are read by"
        logger.info("columns that were checked: %s upweight preprocess %s", seen, shlex.quote(str(path)))
    if not fragment:
        logger.info(
            "not checked, since machines differ: %s (upweight doctor %s)",
            ", ".join(NOT_VALIDATED),
            shlex.quote(str(path)),
        )
    print("ok")


def _reward_specs(config: Config) -> Iterator[str]:
    """Yield what is wrong with the options of built-in rewards."""
    if not config.rollout.reward_funcs:
        return
    from upweight.rewards.builtin.spec import check_specs  # all rewards, a seventh of the time of the command

    try:
        check_specs(config.rollout.reward_funcs, "trl.reward_funcs")
    except UserError as error:
        yield str(error)


def _unknown_lengths(config: Config) -> Iterator[str]:
    """Yield an error for a stream from a local folder whose files do not say how many rows they have."""
    for stage in config.stages or (config,):
        for row in without_end(stage):
            here = existing(row.path, stage.folder)
            if row.path and here is None and not cannot_be_on_hub(row.path):
                warn_once(f"{UNKNOWN_LENGTH} ({row.path} is not here; a stream of the hub has no known length)")
            files = [file for file in here.rglob("*") if file.is_file()] if here and here.is_dir() else []
            if files and not any(file_suffix(file) == f".{COUNTED}" for file in files):
                yield UNKNOWN_LENGTH
