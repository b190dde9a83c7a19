"""Columns of other names: recognised, and the mapping to paste."""

import gzip
import json

import pytest
from docs.format_rows import SHOWN

from made_runs import upweight
from made_tokenizers import byte_tokenizer, encoder
from upweight.config.load import parse_config
from upweight.config.sections.data import DatasetSpec, UserFormat
from upweight.data.columns import first_row, guess_columns, misses_columns, type_mapping
from upweight.data.raw_row import RowError
from upweight.data.sources.first_look import NEEDED, data_problems, missing_columns, swapped_roles
from upweight.errors import UserError

KEYS = {
    "labelled": {"rl": "kto"},
    "pairs": {"rl": "dpo"},
    "steps": {"process_reward_model": True},
    "text": {},
    "prompts": {"rl": "grpo"},
}


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


SHOWN_ROWS = [(kind, name, one.row) for kind, shown in SHOWN.items() for one in shown for name in one.names()]


def entry_of(name):
    return DatasetSpec(
        type=UserFormat() if name.startswith("user_defined") else None if name == "passthrough" else name
    )


@pytest.mark.parametrize(("kind", "name", "row"), SHOWN_ROWS, ids=[f"{kind} {name}" for kind, name, _ in SHOWN_ROWS])
def test_rows_that_a_format_reads_have_the_columns_it_needs_and_no_others_do(kind, name, row):
    assert missing_columns(kind, entry_of(name), row) is None
    for group in NEEDED.get(kind, {}).get(name, ()):
        fewer = {column: value for column, value in row.items() if column not in group}
        assert "needs a column" in (missing_columns(kind, entry_of(name), fewer) or "")
        with pytest.raises(RowError):
            encoder({"type": name}, byte_tokenizer(), chat_template="chatml", sequence_len=512, **KEYS[kind])(fewer)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"path": "./gone.jsonl"}, "datasets[0] (./gone.jsonl): there is no such file or folder. Tried"),
        ({"path": "rowz.jsonl"}, "Did you mean 'rows.jsonl'?"),
        ({"path": "data/*.jsonl"}, "data_files: no file matches 'data/*.jsonl'"),
        ({"path": "json", "data_files": "gone.jsonl"}, "data_files: no file matches 'gone.jsonl'"),
        ({"path": "rows.jsonl", "type": "chat_template"}, "'type: chat_template' needs a column messages or conv"),
        ({"path": "rows.jsonl", "type": "alpaca"}, "In its place: `type: {field_instruction: question, field_output:"),
        ({"path": "rows.jsonl", "type": {"field_instruction": "questoin"}},
         "'questoin' (field_instruction) and 'output' (field_output) of `type`: there is no such column, but "
         "question, answer. Did you mean 'question'?"),
        ({"path": "rows.jsonl", "filter": "mine.keep"}, None),
        ({"path": "rows.jsonl", "type": {"field_instruction": "question", "field_output": "answer"}}, None),
        ({"path": "some-org/some-rows"}, None),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_are_errors_of_validate(tmp_path, monkeypatch, entry, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Why?", "answer": "So."}) + "\n")
    config = parse_config({"base_model": "some/model", "datasets": [entry]}, folder=tmp_path)
    problems = list(data_problems(config))
    assert problems == [] if said is None else said in problems[0]


def test_a_csv_whose_rows_have_more_cells_than_names_is_an_error_of_validate(tmp_path):
    (tmp_path / "rows.csv").write_text("question,answer\nWhy, then?,So.\n")
    config = parse_config({"base_model": "some/model", "datasets": [{"path": "rows.csv"}]}, folder=tmp_path)
    assert "row 0 has 3 cells, and line 1 has 2 names: put cells" in next(data_problems(config))


@pytest.mark.parametrize(("column", "amiss"), [("questoin", "Did you mean 'question'?"), ("question", None)])
def test_the_columns_of_a_csv_are_checked_beside_a_filter(tmp_path, column, amiss):
    (tmp_path / "rows.csv").write_text("question,answer\n,So.\nWhy?,So.\n")
    form = {"field_instruction": column, "field_output": "answer"}
    entry = {"path": "rows.csv", "type": form, "filter": "filters.keep"}
    problems = list(data_problems(parse_config({"base_model": "some/model", "datasets": [entry]}, folder=tmp_path)))
    assert problems == [] if amiss is None else amiss in problems[0]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"type": "own_rows.transfrom"}, "own_rows.py has no function 'transfrom'. Did you mean 'transform'?"),
        ({"type": "own_row.transform"}, "datasets[0].type: there is no own_row.py here, and no such package. Did you"),
        ({"type": "own_rows.transform", "filter": "own_rows.keeps"}, "has no function 'keeps'. Did you mean 'keep'?"),
        ({"type": "own_rows.transform", "filter": "own_rows.keep"}, None),
        ({"type": "elsewhere.transform"}, None),
        ({"type": "chat_template.default"}, None),
    ],
)
def test_a_mistyped_function_of_an_entry_is_an_error_of_validate(tmp_path, monkeypatch, entry, problem):
    monkeypatch.chdir(tmp_path)
    code = "raise SystemExit\ndef transform(cfg): return lambda row: row\ndef keep(row): return True\n"
    (tmp_path / "own_rows.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    entry = {"path": "rows.jsonl", **entry}
    problems = list(data_problems(parse_config({"base_model": "some/model", "datasets": [entry]}, folder=tmp_path)))
    assert problems == [] if problem is None else problem in problems[0]


@pytest.mark.parametrize(
    ("chosen", "rejected", "warned"),
    [("worse reply", "better reply", True), ("better reply", "worse reply", False), ("reply A", "reply B", False)],
)
def test_pairs_whose_columns_are_named_for_the_other_role_are_warned_of(tmp_path, chosen, rejected, warned):
    form = {"field_prompt": "q", "field_chosen": chosen, "field_rejected": rejected}
    entry = {"path": "rows.jsonl", "type": form}
    config = parse_config({"base_model": "some/model", "rl": "dpo", "datasets": [entry]}, folder=tmp_path)
    assert ["exchange them" in warning for warning in swapped_roles(config)] == [True] * warned


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


@pytest.mark.parametrize(
    ("winners", "said"),
    [
        ({"B": "answer", "A": "reply"}, "row 0, 'better': expected 'B', 'A', got 'tie'; `winner_values` of the entry"),
        ({"A": "answr", "tie": None, "B": "reply"}, "'answr' (winner_values.A) of `type`: there is no such column"),
        ({"A": "answer", "tie": None, "B": "reply"}, None),
    ],
)
def test_winners_are_judged_by_validate(tmp_path, winners, said):
    row = {"prompt": "Why?", "answer": "So.", "reply": "No.", "better": "tie"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    entry = {"path": "rows.jsonl", "type": {"field_winner": "better", "winner_values": winners}}
    config = parse_config({"base_model": "some/model", "rl": "dpo", "datasets": [entry]}, folder=tmp_path)
    problems = list(data_problems(config))
    assert problems == [] if said is None else said in problems[0]


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
