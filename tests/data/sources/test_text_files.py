"""Rows of text files by number, and where a bad one stands."""

import gzip
import json

import numpy as np
import pytest

from upweight.data.sources.text_files import LineFile
from upweight.errors import UserError

ROWS = [{"text": f"naïve {number} 😀", "turns": [{"content": None}]} for number in range(5)]


def written(tmp_path, content, name="rows.jsonl"):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return LineFile(file, "text" if name.endswith(".txt") else "json")


def everything(file):
    return file.take(np.arange(len(file)))


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(json.dumps(row) for row in ROWS),
        "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in ROWS),
        "\n\n".join(json.dumps(row) for row in ROWS) + "\n   \n\t\n",
        "\ufeff" + "\n".join(json.dumps(row) for row in ROWS),
        json.dumps(ROWS),
        "\ufeff \n" + json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n",
    ],
    ids=["lines", "windows", "blank lines", "byte-order mark", "list", "spread list"],
)
def test_every_way_to_write_rows(tmp_path, content):
    assert everything(written(tmp_path, content)) == ROWS


def test_rows_in_any_order(tmp_path):
    file = written(tmp_path, json.dumps(ROWS, indent=1))
    assert file.take([3, 0]) == [ROWS[3], ROWS[0]]


def test_one_object_over_several_lines(tmp_path):
    assert everything(written(tmp_path, json.dumps(ROWS[0], indent=2), "row.json")) == [ROWS[0]]


def test_compressed_rows(tmp_path):
    packed = gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode())
    assert everything(written(tmp_path, packed, "rows.jsonl.gz")) == ROWS


PACKED = gzip.compress(bytes(range(256)) * 4, mtime=0)


@pytest.mark.parametrize(
    "content",
    [b"not gzip", PACKED[:-20], *(PACKED[:n] + bytes([PACKED[n] ^ 255]) + PACKED[n + 1 :] for n in (10, 40, 270))],
)
def test_a_damaged_archive_is_the_users_to_mend(content, tmp_path):
    with pytest.raises(UserError, match=r"rows.jsonl.gz: cannot be read"):
        len(written(tmp_path, content, "rows.jsonl.gz"))


def test_text_keeps_its_spaces(tmp_path):
    assert everything(written(tmp_path, "one\n\n  two \r\n", "rows.txt")) == [{"text": "one"}, {"text": "  two "}]


def test_empty_files_have_no_rows(tmp_path):
    assert len(written(tmp_path, "")) == 0
    assert len(written(tmp_path, "[]", "rows.json")) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n// why\n', r"rows.jsonl:2: a comment \('// why'\) is not JSON"),
        ('{"a": 1}\n{"a": 1} // why\n', r"rows.jsonl:2: a comment"),
        ('{"a": 1}\n\n{"a": }\n', r"rows.jsonl:3: not JSON: Expecting value at column 7"),
        ('{"a": 1}\n{"a": "x\n', r"rows.jsonl:2: not JSON: Unterminated string starting at column 7"),
        ('{"a": 1}\n[1]\n', r"rows.jsonl:2: expected an object"),
        ('{\n "a": 1, // why\n "b": 2\n}\n', r"rows.jsonl:2: a comment"),
        ('[{"a": 1},\n {"a": 2}\n {"a": 3}]', r"rows.jsonl:3: not JSON: Expecting ',' or ']'"),
        ('[{"a": 1},\n', r"rows.jsonl:2: not JSON"),
        ('[{"a": 1}] x', r"rows.jsonl:1: not JSON"),
        ('[{"a": 1},\n 5]', r"rows.jsonl:2: expected an object"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"rows.jsonl:2: is not UTF-8 text"),
        ("[" * 100_000, r"rows.jsonl"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        everything(written(tmp_path, content))


def test_places_count_rows_from_0_and_lines_from_1(tmp_path):
    file = written(tmp_path, '{"a": 1}\n\n{"a": 2}\n')
    assert file.location(1) == "row 1 (rows.jsonl:3)"


def test_identity_changes_with_the_content(tmp_path):
    before = written(tmp_path, '{"a": 1}').identity()
    assert written(tmp_path, '{"a": 22}').identity() != before
