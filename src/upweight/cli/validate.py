"""`upweight validate`: `ok`, or one line for each error."""

from pathlib import Path

from upweight.config import load_config
from upweight.log import warn_once


def run(path: Path, overrides: list[str], *, fragment: bool) -> None:
    """Check a config file alone and print `ok`."""
    for notice in load_config(path, overrides, fragment=fragment).notices:
        warn_once(notice)
    print("ok")
