"""What is wrong with the settings of a run, whatever its metrics say: the doctor's and the page's one source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upweight.config import load_config
from upweight.config.rules.training import harmful_settings
from upweight.errors import UserError
from upweight.runs.files import CONFIG


def settings_warnings(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Return the warnings about settings that spoil a run, which the run gave at its start."""
    beside = Path(record.get("config_folder") or folder)  # has the user's code
    try:
        config = load_config(folder / CONFIG, fragment=True, folder=beside)
    except UserError:  # of another version, or its code is gone; the metrics can be judged all the same
        return []
    return harmful_settings(config)
