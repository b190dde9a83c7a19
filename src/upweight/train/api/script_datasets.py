"""The datasets of a training script, with TRL's names: a mixture that its `--config` file lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from datasets import Dataset, DatasetDict, IterableDatasetDict, concatenate_datasets, load_dataset

from upweight.errors import UserError, did_you_mean
from upweight.train.api.fields import with_help


@dataclass
class DatasetConfig:
    """One dataset of a mixture: what `datasets.load_dataset` takes, and what is kept of it."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Which datasets a script trains on; see `get_dataset`."""

    datasets: list[DatasetConfig] = field(
        default_factory=list[DatasetConfig],
        metadata={
            "help": "Datasets of the mixture: path, name, data_dir, data_files, split, columns and fraction of each."
        },
    )
    streaming: bool = with_help(False, "Whether the datasets are streamed.")
    test_split_size: float | None = with_help(None, "Share or number of rows that become the split `test`.")

    def __post_init__(self) -> None:
        known = [one.name for one in fields(DatasetConfig)]
        for number, entry in enumerate(self.datasets):
            if isinstance(entry, Mapping):  # of a YAML file
                values = cast(Mapping[str, Any], entry)
                if unknown := [name for name in values if name not in known]:
                    near = did_you_mean(unknown[0], known)
                    raise UserError(f"datasets[{number}].{unknown[0]}: unknown.{near} Known: {', '.join(known)}.")
                if "path" not in values:
                    raise UserError(f"datasets[{number}]: has no path. Give what `load_dataset` takes first.")
                self.datasets[number] = DatasetConfig(**values)


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """Return the rows of a mixture as the split `train`, and `test` where `test_split_size` asks for one.

    Fractions are the shares of datasets in the mixture, which is as large as it can be without repeating rows.
    """
    entries = mixture_config.datasets
    if not entries:
        raise UserError("datasets: the mixture is empty. Name datasets in the file of `--config`, or use dataset_name.")
    loaded = [_load(entry, streaming=mixture_config.streaming) for entry in entries]
    if any(entry.fraction is not None for entry in entries):
        loaded = _in_shares(loaded, [entry.fraction for entry in entries])
    rows = concatenate_datasets(loaded)
    if mixture_config.test_split_size is None:
        return DatasetDict({"train": rows}) if isinstance(rows, Dataset) else IterableDatasetDict({"train": rows})
    if not isinstance(rows, Dataset):
        raise UserError("test_split_size: a stream cannot be split. Name its rows for evaluation, or do not stream.")
    size = mixture_config.test_split_size
    return rows.train_test_split(test_size=int(size) if size >= 1 else size)


def _load(entry: DatasetConfig, *, streaming: bool) -> Any:
    rows: Any = load_dataset(
        entry.path,
        entry.name,
        data_dir=entry.data_dir,
        data_files=entry.data_files,
        split=entry.split,
        streaming=streaming,
    )
    return rows if entry.columns is None else rows.select_columns(entry.columns)


def _in_shares(loaded: Sequence[Any], fractions: Sequence[float | None]) -> list[Any]:
    """Return the first rows of each dataset, as many as give the shares."""
    given = [one for one in fractions if one is not None]
    if len(given) < len(fractions) or min(given) < 0 or sum(given) == 0:
        raise UserError("datasets: give a positive 'fraction' to each dataset of the mixture, or to none.")
    if not all(isinstance(rows, Dataset) for rows in loaded):
        raise UserError("datasets: streams have no 'fraction'. Leave it out, or do not stream.")
    shares = [one / sum(given) for one in given]
    total = min(len(rows) / share for rows, share in zip(loaded, shares, strict=True) if share > 0)
    return [rows.select(range(round(share * total))) for rows, share in zip(loaded, shares, strict=True)]
