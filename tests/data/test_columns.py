"""Columns of other names: recognised, and the mapping to paste."""

import gzip
import json

import pytest

from made_runs import upweight
from upweight.config.load import parse_config
from upweight.data.columns import first_row, guess_columns, misses_columns, type_mapping
from upweight.data.sources.first_look import data_problems
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
        ("pairs", ["Eingabe", "Bevorzugt", "Abgelehnt"],
         "type: {field_prompt: Eingabe, field_chosen: Bevorzugt, field_rejected: Abgelehnt}"),
        ("pairs", ["Question", "mauvaise", "bonne"],
         "type: {field_prompt: Question, field_chosen: bonne, field_rejected: mauvaise}"),
        ("pairs", ["Frage", "gut", "Geschlecht"], None),  # which is no bad answer
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
    assert misses_columns("text", ["instruction", "response"])
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
    assert (done.returncode, done.stdout) == (2, "")
    pasted = "type: {field_prompt: question, field_chosen: good, field_rejected: bad}"
    assert "datasets[0] (mine.csv): the columns are question, good, bad; rows without a `type` need" in done.stderr
    assert f"Add to it: `{pasted}`" in done.stderr
    (tmp_path / "my.yaml").write_text(config + f"    {pasted}\n")
    assert upweight("validate", tmp_path / "my.yaml").stdout == "ok\n"


FORM = {"field_prompt": "question", "field_completion": "answer", "field_label": "thumbs"}


@pytest.mark.parametrize("entry", [{}, {"as_messages": True}])
def test_labels_in_words_are_an_error_of_validate_and_of_preparation(run, tmp_path, entry):
    rows = [{"question": "Why?", "answer": "So.", "thumbs": mark} for mark in ("up", "down")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"path": "rows.jsonl", "type": FORM, **entry}
    config = parse_config({"base_model": "some/model", "rl": "kto", "datasets": [entry]}, folder=tmp_path)
    problem = (
        "datasets[0] (rows.jsonl): row 0, 'thumbs': expected true or false, got 'up'; in a config, `type: {label_values"
    )
    assert problem in next(data_problems(config))
    with pytest.raises(
        UserError, match=r"row 0 .*'thumbs': expected true or false, got 'up'; in a config, `type: {label"
    ) as error:
        run(rows, rl="kto", datasets=[entry], chat_template="chatml")
    assert "field_label" not in str(error.value)


def test_an_empty_cell_is_named_with_the_filter_that_leaves_it_out(run):
    rows = [{"question": asked, "good": "So.", "bad": "No."} for asked in ("Why?", "")]
    form = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}
    with pytest.raises(UserError, match=r"Its 'question' is empty: `filter: filters\.keep`") as error:
        run(
            rows, rl="dpo", datasets=[{"path": "rows.jsonl", "type": form, "as_messages": True}], chat_template="chatml"
        )
    assert "other names" not in str(error.value)


def test_an_empty_row_is_answered_with_the_filter_and_not_with_names_of_columns(run):
    rows = [{"prompt": "Why?", "chosen": "So.", "rejected": "No."}, {}]
    with pytest.raises(UserError, match=r"row 1 .*The row is empty: `filter: filters\.keep` .*bool\(row\)") as error:
        run(rows, rl="dpo", datasets=[{"path": "rows.jsonl"}], chat_template="chatml")
    assert "other names" not in str(error.value)


def test_an_empty_conversation_is_named_with_the_filter_that_leaves_it_out(run):
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
    rows = [{"conversations": talk}, {"conversations": []}]
    with pytest.raises(UserError, match=r"row 1 .*Its 'conversations' is empty: `filter: filters\.keep`"):
        run(rows, rl=None, datasets=[{"path": "rows.jsonl", "type": "sharegpt"}], chat_template="chatml")


def test_a_cell_that_is_no_text_is_not_answered_with_names_of_columns(run):
    rows = [{"question": asked, "reply": "So."} for asked in ("Why?", 17)]
    form = {"field_instruction": "question", "field_output": "reply"}
    with pytest.raises(UserError, match=r"got the number 17, read from 'question'\. Mend the row") as error:
        run(rows, rl=None, datasets=[{"path": "rows.jsonl", "type": form, "as_messages": True}], chat_template="chatml")
    assert "other names" not in str(error.value)


def test_own_columns_of_a_chat_template_are_mapped(run):
    rows = [{"Question": "Why?", "Reply": "So."}] * 2
    mapping = (
        r"in place of `type: chat_template`: `type: \{field_instruction: Question, field_output: Reply\}` and `as_m"
    )
    with pytest.raises(UserError, match=mapping):
        run(rows, rl=None, datasets=[{"path": "rows.jsonl", "type": "chat_template"}], chat_template="chatml")


def test_messages_in_columns_of_other_names(run, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "Why?"}], "answer": "So."}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = parse_config({"base_model": "some/model", "datasets": [{"path": "rows.jsonl"}]}, folder=tmp_path)
    (problem,) = data_problems(config)
    assert "Add to it: `type: {field_instruction: prompt, field_output: answer}` and" in problem
    assert "`as_messages: true`; to score answers by rewards: `rl: grpo`" in problem
    fields = {"field_instruction": "prompt", "field_output": "answer"}
    entry = {"path": "rows.jsonl", "type": fields, "as_messages": True}  # as it proposes
    assert len(run(rows, rl=None, datasets=[entry], chat_template="chatml").train) == 4


def test_data_of_another_machine_can_be_left_out(tmp_path):
    (tmp_path / "my.yaml").write_text("base_model: tiny\ndatasets:\n  - path: /cluster/rows.jsonl\n")
    done = upweight("validate", tmp_path / "my.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "datasets[0] (/cluster/rows.jsonl): there is no such file" in done.stderr
    assert "--no-data" in done.stderr
    assert upweight("validate", tmp_path / "my.yaml", "--no-data").stdout == "ok\n"


def test_an_error_of_a_row_gives_the_mapping_and_the_mapping_works(run):
    rows = [{"question": f"Why {n}?", "good": "Yes.", "bad": "No."} for n in range(4)]
    with pytest.raises(
        UserError, match=r"Add to datasets\[0\] \(rows.jsonl\): `type: \{field_prompt: question, field_chosen: good"
    ):
        run(rows, datasets=[{"path": "rows.jsonl"}])
    fields = {"field_prompt": "question", "field_chosen": "good", "field_rejected": "bad"}
    assert len(run(datasets=[{"path": "rows.jsonl", "type": fields}]).train) == 4
