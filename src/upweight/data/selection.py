"""What a config trains and evaluates on: its `datasets`, and those of NeMo Gym among them."""

import os
from collections.abc import Iterator
from pathlib import Path

from upweight.config import Config
from upweight.config.sections.data import DatasetRow
from upweight.config.sections.rollout import GymDataset
from upweight.log import logger


def selected_datasets(config: Config) -> Iterator[tuple[str, int, DatasetRow]]:
    """Every entry with its key and number; a file that the Gym lists too is read once, as the Gym's."""
    gym = [_entry(config, dataset) for dataset in config.gym.datasets] if config.gym.enabled else []
    files = {file for row in gym if (file := _real(row.path, config.folder))}
    for number, row in enumerate(config.data.datasets):
        if _real(row.path, config.folder) in files:
            logger.info("datasets[%d] (%s): is listed in nemo_gym_datasets too, and is read once", number, row.path)
        else:
            yield "datasets", number, row
    for number, row in enumerate(gym):
        yield "nemo_gym_datasets", number, row
    for number, row in enumerate(config.data.test_datasets):
        yield "test_datasets", number, row


def _entry(config: Config, dataset: GymDataset) -> DatasetRow:
    """An entry of `nemo_gym_datasets` as one of `datasets`."""
    path, root = Path(os.path.expanduser(dataset.path)), Path(os.path.expanduser(config.gym.folder))
    # The folder of the Gym is a clone of it or an environment that it is installed in.
    places = [root / path, *(inside / path for inside in root.glob("lib/python3*/site-packages")), path]
    return DatasetRow(
        path=str(next((place for place in places if _real(str(place), config.folder)), places[0])),
        type="nemo_gym",
        server_name=dataset.server_name,
        max_samples=dataset.max_samples,
    )


def _real(path: str | None, folder: Path) -> Path | None:
    """Where a path leads, seen from the working directory and then from the config's folder."""
    wide = Path(os.path.expanduser(path or ""))
    return next((place.resolve() for place in (wide, folder / wide) if place.is_file()), None)
