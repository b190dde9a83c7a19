"""Columns of other names: recognised, and the mapping to paste."""

import gzip
import json

import pytest

from made_runs import upweight
from upweight.data.columns import first_row, guess_columns, misses_columns, type_mapping
from upweight.errors import UserError


@pytest.mark.parametrize(
    ("kind", "columns", "expected"),
    [
        ("pairs", ["question", "good", "bad"],
         "type: {field_prompt: question, field_chosen: good, field_rejected: bad}"),
        ("pairs", ["id", "userQuery", "answer_better", "answer_worse"],
         "type: {field_prompt: userQuery, field_chosen: answer_better, field_rejected: answer_worse}"),
        ("labelled", ["input", "reply", "thumbs_up"],
         "type: {field_prompt: input, field_completion: reply, field_label: thumbs_up}"),
        ("text", ["question", "answer"], "type: {field_instruction: question, field_output: answer}"),
        ("prompts", ["promt", "id"], "type: {field_prompt: promt}"),
        ("pairs", ["a", "b", "c"], None),
        ("pairs", ["question", "good"], None),
    ],
)  # fmt: skip
def test_the_mapping_to_paste(kind, columns, expected):
    assert type_mapping(kind, columns) == expected


def test_a_column_has_one_role():
    assert guess_columns("labelled", ["prompt", "completion", "good"])["label"] == "good"
    assert not misses_columns("pairs", ["chosen", "rejected"])
    assert misses_columns("pairs", ["chosen", "question"])
    assert not misses_columns("steps", ["anything"])  # whose columns are not known here


def test_the_first_row_of_a_file(tmp_path):
    row = {"question": "Why?", "good": "Yes,\nso.", "bad": "No."}
    (tmp_path / "a.csv").write_text('question,good,bad\n"Why?","Yes,\nso.",No.\n')
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    (tmp_path / "a.json").write_text(json.dumps([row, row], indent=2))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps(row))
    for name in ("a.csv", "a.jsonl", "a.json", "b.jsonl.gz"):
        assert first_row(tmp_path / name) == row, name
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert [first_row(tmp_path / name) for name in ("broken.json", "rows.parquet", "missing.csv")] == [None] * 3


def test_validate_gives_the_mapping(tmp_path):
    (tmp_path / "mine.csv").write_text("question,good,bad\nWhy?,Yes.,No.\n")
    config = "base_model: tiny\nrl: dpo\ndatasets:\n  - path: mine.csv\n"
    (tmp_path / "my.yaml").write_text(config)
    done = upweight("validate", tmp_path / "my.yaml")
    assert (done.returncode, done.stdout) == (0, "ok\n")
    pasted = "type: {field_prompt: question, field_chosen: good, field_rejected: bad}"
    assert f"mine.csv has question, good, bad, which 'dpo' does not read. Add to it: `{pasted}`" in done.stderr
    (tmp_path / "my.yaml").write_text(config + f"    {pasted}\n")
    assert "does not read" not in upweight("validate", tmp_path / "my.yaml").stderr


def test_an_error_of_a_row_gives_the_mapping_and_the_mapping_works(run):
    rows = [{"question": f"Why {n}?", "good": "Yes.", "bad": "No."} for n in range(4)]
    with pytest.raises(
        UserError, match=r"Add to datasets\[0\] \(rows.jsonl\): `type: \{field_prompt: question, field_chosen: good"
    ):
        run(rows, datasets=[{"path": "rows.jsonl"}])
    fields = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}
    assert len(run(datasets=[{"path": "rows.jsonl", "type": fields}]).train) == 4
