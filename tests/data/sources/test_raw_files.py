"""Files that are not UTF-8: the message has the line, the byte, what it may be, and a command that works."""

import gzip
import json
import re
import shlex
import subprocess

import pytest

from upweight.config import load_config
from upweight.config.sections.data import DatasetSpec
from upweight.data.sources.first_look import data_problems
from upweight.data.sources.open import open_entry
from upweight.data.sources.raw_files import encoding_problem
from upweight.errors import UserError

CSV = "question;answer\nWhy not?;So.\nGrüße?;Schön, €5\n"


def taken(path, folder, **options):
    opened = open_entry(DatasetSpec(path=path, **options), "datasets[0]", folder)
    return (opened.first_rows(9) if options else opened).rows().take(0, 9)


@pytest.mark.parametrize("options", [{}, {"streaming": True}], ids=["read", "streamed"])
@pytest.mark.parametrize(
    ("name", "text"),
    [("rows.csv", CSV), ("late.csv", "a;b\n" + "x;y\n" * 7 + "Grüße;b\n"), ("rows.jsonl", '{"a": "Grüße"}\n')],
)
def test_files_of_windows_are_answered_with_the_command_that_converts_them(tmp_path, monkeypatch, name, text, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="cp1252")
    line = text[: text.index("ü")].count("\n") + 1
    with pytest.raises(UserError, match=rf"{name}:{line}: .* byte 0xfc at place .*Grüße") as caught:
        taken(name, tmp_path, **options)
    subprocess.run(re.search(r"`(iconv [^`]*)`", str(caught.value))[1], shell=True, check=True)
    converted = next(tmp_path.glob("*-utf8.*"))
    assert converted.read_text() == text
    assert taken(converted.name, tmp_path, **options)


def test_marks_of_byte_order_are_read_over_and_utf16_is_named(tmp_path):
    file = tmp_path / "my rows.csv"
    file.write_text(CSV, encoding="utf-8-sig")
    assert encoding_problem(file) is None
    file.write_text(CSV, encoding="utf-16")
    assert f"`iconv -f utf-16 -t utf-8 {shlex.quote(str(file))} > 'my rows-utf8.csv'`" in encoding_problem(file)


def test_no_encoding_is_proposed_where_it_would_mangle_texts(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes('{"a": "ü"}\n'.encode() + b'{"a": "\xfc"}\n')
    problem = encoding_problem(file)
    assert "rows.jsonl:2" in problem
    assert "other lines are UTF-8" in problem
    assert "iconv" not in problem
    file.write_bytes(b'{"a": "\x81"}\n')  # no letter of cp1252
    assert "-f ENCODING" in encoding_problem(file)
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(CSV.encode("cp1252")))
    assert "unpack it" in encoding_problem(packed)


def test_validate_looks_at_the_first_lines(tmp_path):
    (tmp_path / "rows.csv").write_text(CSV, encoding="cp1252")
    entry = {"path": "rows.csv", "type": {"field_instruction": "question", "field_output": "answer"}}
    config = {"base_model": "tiny", "datasets": [entry]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (problem,) = data_problems(load_config(tmp_path / "config.yaml"))
    assert "rows.csv:3: is not UTF-8" in problem


@pytest.mark.parametrize("streaming", [False, True])
def test_a_workbook_is_answered_with_how_to_save_it(tmp_path, streaming):
    (tmp_path / "rows.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"rows\.xlsx: is a workbook, which is not read: save it in Excel"):
        open_entry(DatasetSpec(path="rows.xlsx", streaming=streaming), "datasets[0]", tmp_path)
    config = {"base_model": "tiny", "datasets": [{"path": "rows.xlsx"}]}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (problem,) = data_problems(load_config(tmp_path / "config.yaml"))
    assert "is a workbook" in problem
