import json

import pytest

from upweight import DatasetMixtureConfig, ScriptArguments, TrlParser, get_dataset
from upweight.errors import UserError
from upweight.train.api.script_datasets import DatasetConfig


def rows_in(folder, name, count):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{name}{number}", "extra": 1}) + "\n" for number in range(count)))
    return DatasetConfig(path="json", data_files=str(path))


def texts(rows):
    return [row["text"] for row in rows]


def test_a_mixture_of_a_file_is_read_and_joined(tmp_path):
    one, two = rows_in(tmp_path, "a", 2), rows_in(tmp_path, "b", 1)
    listed = "".join(f"  - {{path: json, data_files: {entry.data_files}, columns: [text]}}\n" for entry in (one, two))
    (tmp_path / "mix.yaml").write_text(f"datasets:\n{listed}")
    words = ["--config", str(tmp_path / "mix.yaml")]
    script, mixture = TrlParser((ScriptArguments, DatasetMixtureConfig)).parse_args_and_config(words)
    assert script == ScriptArguments()
    rows = get_dataset(mixture)
    assert texts(rows["train"]) == ["a0", "a1", "b0"]
    assert rows["train"].column_names == ["text"]
    assert list(rows) == ["train"]


def test_without_a_file_a_mixture_is_empty():
    (mixture,) = TrlParser(DatasetMixtureConfig).parse_args_and_config([])
    assert mixture == DatasetMixtureConfig()
    with pytest.raises(UserError, match="the mixture is empty"):
        get_dataset(mixture)


def test_fractions_are_shares_without_repeats(tmp_path):
    entries = [rows_in(tmp_path, "a", 12), rows_in(tmp_path, "b", 5)]
    entries[0].fraction, entries[1].fraction = 3, 1
    rows = texts(get_dataset(DatasetMixtureConfig(entries))["train"])
    assert rows == [*(f"a{number}" for number in range(12)), "b0", "b1", "b2", "b3"]
    entries[1].fraction = None
    with pytest.raises(UserError, match="'fraction' to each dataset"):
        get_dataset(DatasetMixtureConfig(entries))


def test_streams_and_test_splits(tmp_path):
    entries = [rows_in(tmp_path, "a", 6)]
    assert texts(get_dataset(DatasetMixtureConfig(entries, streaming=True))["train"]) == [f"a{n}" for n in range(6)]
    split = get_dataset(DatasetMixtureConfig(entries, test_split_size=2))
    assert [len(texts(split[name])) for name in ("train", "test")] == [4, 2]
    with pytest.raises(UserError, match="a stream cannot be split"):
        get_dataset(DatasetMixtureConfig(entries, streaming=True, test_split_size=2))


def test_mistakes_in_a_mixture_are_named():
    with pytest.raises(UserError, match=r"datasets\[0\]\.splits: unknown\. Did you mean 'split'\?"):
        DatasetMixtureConfig([{"path": "x", "splits": "train"}])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"datasets\[0\]: has no path"):
        DatasetMixtureConfig([{"name": "x"}])  # pyright: ignore[reportArgumentType]
