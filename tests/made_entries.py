"""What the rows of a user's file become by the config that `upweight new` wrote beside it."""

from pathlib import Path
from typing import Any

import yaml

from made_tokenizers import encoder
from upweight.cli.starter.new import _table_of


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config in a folder."""
    return yaml.safe_load((folder / "config.yaml").read_text())


def rows_read(folder: Path) -> list[dict[str, Any]]:
    """Return the texts of each row of the config's file, plain, without those that the config leaves out."""
    config = read_config(folder)
    (entry,) = config["datasets"]
    plain = {key: value for key, value in entry.items() if key in ("type", "filter")}
    read = encoder(plain, folder=folder, **{key: config[key] for key in ("rl", "reward_model") if key in config})
    return [record.text for row in _table_of(folder / entry["path"]).rows for record in read(row)]
