"""Columns that an entry names have to be read; processes that encode rows end with the one that started them."""

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset

from made_tokenizers import encoder
from upweight.data.sources.open import RowSelection, Table
from upweight.data.workers import CHUNK_ROWS, EncodeJob, encode_all, refuse_unread
from upweight.errors import UserError
from upweight.processes import is_alive

PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "better": "Yes.", "s": "S", "label": True}
TALK = {"messages": [{"role": "user", "content": "Why?"}], "chosen": "So.", "better": "Yes.", "rejected": "No."}


def job(entry, row, folder=None, **keys):
    made = encoder(entry, folder=folder, chat_template="chatml", **keys)
    rows = RowSelection.of(Table(Dataset.from_list([row])))
    return EncodeJob("datasets[0] (rows.jsonl)", False, rows, made)


@pytest.mark.parametrize(
    ("entry", "row", "key"),
    [
        ({"type": "chatml.prompt_pairs", "field_chosen": "better"}, PAIR, "field_chosen: better"),
        ({"field_system": "s"}, PAIR, "field_system: s"),
        ({"type": {"field_instruction": "prompt", "field_label": "label"}}, PAIR, "type.field_label: label"),
        ({"type": "chatml.prompt_pairs", "field_messages": "s"}, PAIR, "field_messages: s"),
    ],
)
def test_a_column_that_is_named_and_not_read_is_refused(entry, row, key):
    with pytest.raises(UserError, match=f"'{key}' has no effect"):
        refuse_unread(job(entry, row, rl="dpo"))


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({"type": "chatml.prompt_pairs", "field_system": "s"}, PAIR),
        ({"type": "chat_template", "field_chosen": "better", "field_tools": "none"}, TALK),
        ({"type": {"field_prompt": "s", "field_chosen": "better"}}, PAIR),
        ({"type": "chatml.prompt_pairs", "field_chosen": "none"}, PAIR),
        ({"type": "chatml.intel", "field_chosen": "better"}, PAIR),
        ({}, PAIR),
    ],
)
def test_columns_that_are_read_or_missing_are_not(entry, row):
    refuse_unread(job(entry, row, rl="dpo"))


@pytest.mark.parametrize(
    ("form", "rl", "problem"),
    [
        ({"field_prompt": "prompt", "field_chosen": "beter"}, "dpo", "`field_chosen` names 'beter'.*mean 'better'"),
        ({"field_instruction": "prompt", "field_output": "bettr"}, None, "`field_output` names 'bettr'.*mean 'better'"),
    ],
)
def test_a_mapped_column_that_is_not_there_is_named(form, rl, problem):
    row = {"prompt": "Why?", "better": "So.", "rejected": "No."}
    encoding = job({"type": form, "as_messages": True}, row, **({"rl": rl} if rl else {}))
    with pytest.raises(UserError, match=problem):
        list(encode_all([encoding], 1))


def test_further_bad_rows_are_counted_and_the_next_ones_named(monkeypatch):
    monkeypatch.setattr("upweight.data.workers.CHUNK_ROWS", 4)  # those of later chunks too
    rows = [{**PAIR, "chosen": None} if number % 2 else PAIR for number in range(14)]
    encoding = replace(job({}, PAIR, rl="dpo"), rows=RowSelection.of(Table(Dataset.from_list(rows))))
    line = r"row 1, 'chosen'.*\n7 of the first 14 rows have such errors; the next ones: row 3, row 5, row 7, row 9$"
    with pytest.raises(UserError, match=line):
        list(encode_all([encoding], 1))


def test_transforms_read_what_they_like(tmp_path):
    (tmp_path / "own_rows.py").write_text("def transform(cfg):\n    return lambda row: row\n")
    refuse_unread(job({"type": "own_rows.transform", "field_chosen": "better"}, PAIR, Path(tmp_path), rl="dpo"))


def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path):
    lines = ["import os, time", "def keep(row):", f"    open(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close()"]
    (tmp_path / "slow_rows.py").write_text("\n".join([*lines, "    time.sleep(60)", "    return True"]))
    made = encoder({"filter": "slow_rows.keep"}, folder=tmp_path, chat_template="chatml", rl="dpo")
    rows = RowSelection.of(Table(Dataset.from_list([PAIR] * 2 * CHUNK_ROWS)))
    jobs = [EncodeJob("datasets[0] (rows.jsonl)", False, rows, made)]
    starter = multiprocessing.get_context("fork").Process(target=lambda: list(encode_all(jobs, 2)))
    starter.start()
    deadline = time.monotonic() + 60
    while len(found := list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(file.stem) for file in found]
    assert len(workers) == 2
    starter.kill()
    starter.join()
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
