"""The trials of a sweep: all combinations of the values that keys were given, each with a folder of its own."""

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from upweight.config import Config, load_config
from upweight.errors import UserError

LONGEST_NAME = 80  # letters of a folder's name
OPENS, CLOSES, QUOTES = "[{(", "]})", "\"'"


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: the swept keys with their values, and the name of its folder."""

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Return the name of the folder, which the values alone decide, so that a later sweep finds it."""
        text = "__".join(f"{key}_{value}" for key, value in self.values)
        plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text)
        if plain == text and len(plain) <= LONGEST_NAME:
            return plain
        return f"{plain[: LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def overrides(self) -> list[str]:
        """Return the keys as a command takes them."""
        return [f"{key}={value}" for key, value in self.values]


def split_values(text: str) -> list[str]:
    """Split a value at its commas, but not inside brackets or quotes: `[1,2],[3]` are two lists."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        else:
            depth += (letter in OPENS) - (letter in CLOSES)
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def plan_trials(arguments: Sequence[str], *, most: int | None = None, seed: int = 0) -> tuple[list[str], list[Trial]]:
    """Return the keys that all trials share, and the trials; with `most`, so many of them drawn by `seed`."""
    shared: list[str] = []
    swept: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, text = argument.lstrip("-").partition("=")
        if not equals or not key:
            raise UserError(f"{argument!r}: expected KEY=VALUE,VALUE..., as in learning_rate=1e-6,1e-5")
        values = split_values(text)
        if len(values) == 1:
            shared.append(f"{key}={text}")
        elif "" in values or len(set(values)) < len(values):
            raise UserError(f"{key}: a value is empty or stands twice in {text!r}")
        elif key in swept:
            raise UserError(f"{key}: has values in two places; name them in one")
        else:
            swept[key] = values
    if not swept:
        raise UserError("name at least one key with several values, as in learning_rate=1e-6,1e-5")
    if "output_dir" in swept or any(one.startswith("output_dir=") for one in shared):
        raise UserError("output_dir: each trial has a folder of its own in that of the sweep; name it with --output")
    trials = [Trial(tuple(zip(swept, values, strict=True))) for values in itertools.product(*swept.values())]
    if most is not None and most < len(trials):
        chosen = sorted(random.Random(seed).sample(range(len(trials)), most))
        trials = [trials[number] for number in chosen]
    return shared, trials


def check_trials(path: Path, shared: Sequence[str], trials: Sequence[Trial], folder: Path) -> list[Config]:
    """Load the config of every trial, or raise with all their errors before the first begins."""
    configs, problems = [], []
    for trial in trials:
        try:
            config = load_config(path, [*shared, *trial.overrides(), f"output_dir={folder / trial.name}"])
        except UserError as error:
            problems.append(f"{' '.join(trial.overrides())}:\n{error}")
            continue
        if config.stages:
            raise UserError("stages: a sweep trains configs of one stage; sweep over each stage by itself.")
        configs.append(config)
    if problems:
        raise UserError("\n".join(problems))
    return configs
