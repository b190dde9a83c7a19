"""What is said of data before they are opened: missing files, columns that are not there, mistyped functions."""

import json

import pytest
from docs.format_rows import SHOWN

from made_tokenizers import byte_tokenizer, encoder
from upweight.config.load import parse_config
from upweight.config.sections.data import DatasetSpec, UserFormat
from upweight.data.raw_row import RowError
from upweight.data.sources.first_look import NEEDED, data_problems, missing_columns, swapped_roles

KEYS = {
    "labelled": {"rl": "kto"},
    "pairs": {"rl": "dpo"},
    "steps": {"process_reward_model": True},
    "text": {},
    "prompts": {"rl": "grpo"},
}


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
