"""Where rows come from: files, folders, splits, slices, shards, and what is said when they are not there."""

import json
import logging
from pathlib import Path

import datasets
import pytest

from upweight.config.sections.data import DatasetSpec
from upweight.data.columns import first_row
from upweight.data.sources.open import open_entry
from upweight.errors import UserError

ROWS = [{"prompt": f"p{number}", "turns": [{"role": "user", "content": f"c{number}"}]} for number in range(20)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The config's folder, with rows in it; the working directory is another one."""
    work, home = tmp_path / "work", tmp_path / "config"
    work.mkdir()
    home.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write(home / "rows.jsonl", ROWS)
    return home


def write(path: Path, rows) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(folder, evaluation=False, **entry):
    rows = open_entry(DatasetSpec(**entry), "datasets[0]", folder, evaluation=evaluation).rows()
    return [row["prompt"] for row in rows.take(0, len(rows))]


def numbers(*ranges):
    return [f"p{number}" for start, stop in ranges for number in range(start, stop)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, [(0, 20)]),
        ("train", [(0, 20)]),
        ("train[:5]", [(0, 5)]),
        ("train[5:10]", [(5, 10)]),
        ("train[-3:]", [(17, 20)]),
        ("train[:10%]", [(0, 2)]),
        ("train[50%:]", [(10, 20)]),
        ("train[:2]+train[18:]", [(0, 2), (18, 20)]),
    ],
)
def test_splits_and_slices(folder, split, expected):
    assert prompts(folder, path="rows.jsonl", split=split) == numbers(*expected)


@pytest.mark.parametrize("split", ["test", "train[:5", "train[a:b]"])
def test_a_split_that_is_not_there(folder, split):
    with pytest.raises(UserError, match=r"datasets\[0\] \(rows.jsonl\): split '.*' cannot be selected. There"):
        prompts(folder, path="rows.jsonl", split=split)


def test_shards_part_the_rows(folder):
    shards = [prompts(folder, path="rows.jsonl", shards=3, shards_idx=index) for index in range(3)]
    assert sorted(prompt for shard in shards for prompt in shard) == sorted(numbers((0, 20)))
    assert {len(shard) for shard in shards} == {6, 7}


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "arrow", "saved", "json", "txt"])
def test_file_types(folder, kind):
    table = datasets.Dataset.from_list(ROWS)
    file = folder / f"table.{kind}"
    if kind in ("csv", "tsv"):
        table.select_columns("prompt").to_csv(file, sep="\t" if kind == "tsv" else ",")
    elif kind == "parquet":
        table.to_parquet(file)
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    elif kind == "txt":
        file.write_text("\n".join(row["prompt"] for row in ROWS))
        rows = open_entry(DatasetSpec(path="table.txt"), "datasets[0]", folder).rows()
        assert rows.take(3, 4) == [{"text": "p3"}]
        return
    else:
        table.save_to_disk(file)
        file = next(file.glob("*.arrow")) if kind == "arrow" else file
    assert prompts(folder, path=str(file)) == numbers((0, 20))
    assert prompts(folder, path=str(file), split="train[3:5]") == numbers((3, 5))


def test_cells_of_a_csv_stay_text(folder):
    (folder / "cells.csv").write_text('prompt,chosen,label\n007,"a\nb",True\nNA,,1\n', encoding="utf-8-sig")
    rows = open_entry(DatasetSpec(path="cells.csv"), "datasets[0]", folder).rows()
    assert rows.take(0, 2) == [
        {"prompt": "007", "chosen": "a\nb", "label": "True"},
        {"prompt": "NA", "chosen": "", "label": "1"},
    ]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("streaming", [False, True])
def test_spreadsheets_that_separate_cells_otherwise_are_read(folder, separator, streaming):
    lines = (["prompt", "chosen"], ["Why, then?", "So; so."])
    text = "".join(separator.join(f'"{cell}"' for cell in cells) + "\n" for cells in lines)
    (folder / "cells.csv").write_text(text, encoding="utf-8-sig")
    opened = open_entry(DatasetSpec(path="cells.csv", streaming=streaming), "datasets[0]", folder)
    rows = (opened.first_rows(1) if streaming else opened).rows()
    assert rows.take(0, 1) == [{"prompt": "Why, then?", "chosen": "So; so."}] == [first_row(folder / "cells.csv")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3,4,5\n", "line 3"),
        ("", "is empty"),
        ("a,a\n1,2\n", "column 'a' appears twice"),
        ('a,b\n\n"x\ny",2,3\n4,5,6\n', r"bad\.csv:4: has 3 cells, and line 1 has 2 names: put cells"),
        ("a,b\n1,2,\n3,4,\n", "it ends in a separator, so end line 1 in one too"),
        ("a,b\n\n", "has no rows"),
        ("a,b\n\xe9,2\n", "`iconv -f cp1252 -t utf-8"),
    ],
)
def test_a_bad_csv_is_explained(folder, content, message):
    (folder / "bad.csv").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        prompts(folder, path="bad.csv")


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_without_a_name_and_long_cells_are_read(folder, streaming):
    long = "word " * 40_000
    (folder / "index.csv").write_text(f",prompt,answer,,\n0,{long},So.,,\n")  # as pandas writes its index
    opened = open_entry(DatasetSpec(path="index.csv", streaming=streaming), "datasets[0]", folder)
    (row,) = (opened.first_rows(1) if streaming else opened).rows().take(0, 1)
    assert (row["prompt"], row["answer"]) == (long, "So.")
    assert set(row) - {"prompt", "answer"} == {"Unnamed: 0", "Unnamed: 3", "Unnamed: 4"}
    assert row == first_row(folder / "index.csv")


def test_a_table_without_rows_is_explained(folder):
    datasets.Dataset.from_dict({"prompt": ["p"]}).select([]).to_parquet(folder / "none.parquet")
    with pytest.raises(UserError, match="parquet: has no rows"):
        prompts(folder, path="none.parquet")


def test_folders_have_the_splits_that_their_files_name(folder):
    write(folder / "many" / "train.jsonl", ROWS[:15])
    write(folder / "many" / "test.jsonl", ROWS[15:])
    assert prompts(folder, path="many") == numbers((0, 15))
    assert prompts(folder, path="many", evaluation=True) == numbers((15, 20))
    assert prompts(folder, path="many", split="test[:2]+train[:1]") == numbers((15, 17), (0, 1))
    assert prompts(folder, path="many", ds_type="json", split="test") == numbers((15, 20))
    assert prompts(folder, path="many", data_files="te*.jsonl") == numbers((15, 20))


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_a_folder_that_are_not_read_are_named(streaming, folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("upweight"), "propagate", True)
    several = folder / f"several{streaming}"  # a warning is given once
    write(several / "a.jsonl", ROWS[:2])
    write(several / "b.jsonl", ROWS[2:])
    open_entry(DatasetSpec(path=str(several), streaming=streaming), "datasets[0]", folder)
    assert "not read" not in caplog.text
    datasets.Dataset.from_list(ROWS[:3]).to_parquet(several / "c.parquet")
    open_entry(DatasetSpec(path=str(several), streaming=streaming, ds_type="json"), "datasets[0]", folder)
    assert "not read" not in caplog.text
    open_entry(DatasetSpec(path=str(several), streaming=streaming), "datasets[0]", folder)
    assert "is read as json files; not read: c.parquet" in caplog.text


def test_a_folder_of_parquet_is_read_again_when_it_changes(folder):
    (folder / "many").mkdir()
    entry = DatasetSpec(path="many")
    datasets.Dataset.from_list(ROWS[:3]).to_parquet(folder / "many" / "train.parquet")
    before = open_entry(entry, "datasets[0]", folder)
    assert len(before.rows()) == 3
    datasets.Dataset.from_list(ROWS[:4]).to_parquet(folder / "many" / "train.parquet")
    after = open_entry(entry, "datasets[0]", folder)
    assert len(after.rows()) == 4
    assert after.identity() != before.identity()


def test_data_files_with_and_without_a_path(folder):
    write(folder / "more.jsonl", ROWS[:2])
    assert prompts(folder, ds_type="json", data_files=["more.jsonl", "rows.jsonl"]) == numbers((0, 2), (0, 20))
    assert prompts(folder, path="json", data_files="more.jsonl") == numbers((0, 2))
    assert prompts(folder, ds_type="json", data_files="*.jsonl", split="train[:3]") == [*numbers((0, 2)), "p0"]


def test_several_names_are_joined(folder):
    for name in ("easy", "hard"):
        write(folder / "graded" / f"{name}.jsonl", ROWS[:2] if name == "easy" else ROWS[10:12])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("easy", "hard"))
    (folder / "graded" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert prompts(folder, path="graded", name="hard") == numbers((10, 12))
    assert prompts(folder, path="graded", name=["easy", "hard"]) == numbers((0, 2), (10, 12))
    with pytest.raises(UserError, match=r"datasets\[0\] \(graded\): cannot be loaded: .*'odd'"):
        prompts(folder, path="graded", name="odd")


def test_a_line_of_a_csv_with_more_cells_than_names(folder):
    (folder / "ragged.csv").write_text("prompt,answer\nWhy?,So.\nWho?,You, or me.\n")
    with pytest.raises(UserError, match=r"in line 3, saw 3\. Put cells that hold the separator into double quotes"):
        prompts(folder, path="ragged.csv")


def test_the_working_directory_comes_before_the_configs_folder(folder):
    write(Path("rows.jsonl"), ROWS[:1])
    assert prompts(folder, path="rows.jsonl") == ["p0"]
    assert len(prompts(folder, path=str(folder / "rows.jsonl"))) == 20


def test_the_home_folder_is_meant_by_a_tilde(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert len(prompts(Path("/nowhere"), path="~/rows.jsonl")) == 20
    assert len(prompts(Path("/nowhere"), ds_type="json", data_files="~/rows.jsonl")) == 20


@pytest.mark.parametrize("path", ["nope.jsonl", "./nope", "a/b/c", "two words"])
def test_a_missing_file_names_both_places(folder, path):
    with pytest.raises(UserError, match=r"there is no such file or folder. Tried .*work.* and .*config.*"):
        prompts(folder, path=path)
    with pytest.raises(UserError, match=r"data_files: no file matches .* Tried .*work.* and .*config.*"):
        prompts(folder, ds_type="json", data_files=path)


def test_a_hub_dataset_that_cannot_be_had(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError,
        match=r"who/what\): is no file or folder .*HF_HUB_OFFLINE.*`hf download who/what --repo-type dataset",
    ):
        prompts(folder, path="who/what")


def test_empty_data_is_refused(folder):
    write(folder / "none.jsonl", [])
    with pytest.raises(UserError, match=r"datasets\[0\] \(none.jsonl\): has no rows"):
        prompts(folder, path="none.jsonl")
