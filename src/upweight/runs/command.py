"""The command line that continues a run, for messages and the record of the run."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from upweight.config.redact import redacted
from upweight.runs.checkpoints import newest_marked

VARIABLE = "UPWEIGHT_RESUME"  # an environment variable, so that ranks name the command that started them
OPTION = "--resume"
REPLACED = ("resume_from_checkpoint", "resume-from-checkpoint")  # keys that would go back to where this run began
_folders: list[Path] = []  # of the run under way


@contextmanager
def started_by(arguments: Sequence[str], launcher_arguments: Sequence[str] = ()) -> Iterator[None]:
    """Know how a run is started, as arguments of `upweight train`, to say how it is continued."""
    if "RANK" in os.environ and VARIABLE in os.environ:  # the process that started the ranks has said it
        yield
        return
    words = ["upweight", "train", *_without(arguments, REPLACED), OPTION]
    os.environ[VARIABLE] = shlex.join([*words, *(["--", *launcher_arguments] if launcher_arguments else [])])
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def resume_words() -> str:
    """Return the command that continues this run, in backticks; of a run without a known command, the option."""
    command = os.environ.get(VARIABLE)
    return OPTION if command is None else f"`{command}`"


@contextmanager
def training_into(folder: Path) -> Iterator[None]:
    """Know the folder of the run, to say whether there is a checkpoint that it can continue from."""
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.pop()


def resume_advice() -> str:
    """Return what to do once a cause of this run is fixed."""
    if not _folders:
        return f"go on with {resume_words()}"
    return resume_from(newest_marked(_folders[-1]), resume_words())


def resume_from(step: int | None, command: str) -> str:
    """Return how a run goes on: from its last whole checkpoint by a command; where it has none, by another start."""
    if step is None:
        return "start again: there is no whole checkpoint (save_steps sets how often one is written)"
    return f"go on from step {step} with {command}"


def recorded_advice(record: Mapping[str, Any], whole: int | None, *, trained: bool) -> str:
    """Return how a run that has ended goes on; of one that had not begun to train, nothing is said of checkpoints."""
    unnamed = "resume_from_checkpoint=True" if "settings" in record else "upweight train CONFIG --resume"
    command = f"`{record.get('command') or unnamed}`"
    if trained or whole:
        return resume_from(whole, command)
    return f"start again with {command.replace(f' {OPTION}', '')}" if "upweight train" in command else "start again"


def moved(record: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the record of a run with a command that continues it where it lies now, also moved or copied."""
    begun, command = record.get("folder"), record.get("command")
    if begun is None or not command or Path(begun) == folder.resolve():
        return dict(record)
    words = list(_without(shlex.split(command), ("output_dir",)))
    place = words.index(OPTION) if OPTION in words else len(words)
    of_all = folder.parent if re.fullmatch(r"stage-\d+-.+", folder.name) else folder
    return {**record, "command": shlex.join([*words[:place], f"output_dir={of_all.resolve()}", *words[place:]])}


def recorded_command() -> str | None:
    """Return the command that continues this run without credentials, for files; None where it is not known."""
    command = os.environ.get(VARIABLE)
    return None if command is None else shlex.join(map(_harmless, shlex.split(command)))


def _without(arguments: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    """Yield arguments without those that set one of the keys, as `key=value` or as `--key value`."""
    is_value = False
    for word in arguments:
        key, equals, _ = word.lstrip("-").partition("=")
        if key in keys:
            is_value = not equals
        elif not is_value:
            yield word
        else:
            is_value = False


def _harmless(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{key}={redacted({key.lstrip('-').rpartition('.')[2]: value}).popitem()[1]}" if equals else redacted(word)
