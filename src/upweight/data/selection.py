"""The dataset entries that a config trains and evaluates on, including those of NeMo Gym."""

import os
from collections.abc import Iterator
from pathlib import Path

from upweight.config import Config
from upweight.config.sections.data import DatasetRow
from upweight.config.sections.rollout import GymDataset
from upweight.log import logger


def selected_datasets(config: Config) -> Iterator[tuple[str, int, DatasetRow]]:
    """Yield every entry with its key and index; a file that is also a Gym dataset is read once, as the Gym's."""
    gym = [_gym_entry(config, dataset) for dataset in config.gym.datasets] if config.gym.enabled else []
    files = {file for row in gym if (file := _resolved(row.path, config.folder))}
    for number, row in enumerate(config.data.datasets):
        if _resolved(row.path, config.folder) in files:
            logger.info("datasets[%d] (%s): is listed in nemo_gym_datasets too; it is read once", number, row.path)
        else:
            yield "datasets", number, row
    for number, row in enumerate(gym):
        yield "nemo_gym_datasets", number, row
    for number, row in enumerate(config.data.test_datasets):
        yield "test_datasets", number, row


def _gym_entry(config: Config, dataset: GymDataset) -> DatasetRow:
    """Return an entry of `nemo_gym_datasets` as an entry of `datasets`."""
    path, root = Path(os.path.expanduser(dataset.path)), Path(os.path.expanduser(config.gym.folder))
    # The Gym's folder is a clone of its repository or a virtual environment with it installed.
    candidates = [root / path, *(inside / path for inside in root.glob("lib/python3*/site-packages")), path]
    return DatasetRow(
        path=str(
            next((candidate for candidate in candidates if _resolved(str(candidate), config.folder)), candidates[0])
        ),
        type="nemo_gym",
        server_name=dataset.server_name,
        max_samples=dataset.max_samples,
    )


def _resolved(path: str | None, folder: Path) -> Path | None:
    """Resolve a file path from the working directory, then from the config's folder; None if neither exists."""
    expanded = Path(os.path.expanduser(path or ""))
    return next((candidate.resolve() for candidate in (expanded, folder / expanded) if candidate.is_file()), None)
