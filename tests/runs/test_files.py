"""Files that grow, are cut off or are written anew."""

from upweight.runs.files import JsonLines, read_json


def test_lines_are_read_as_they_come_and_half_a_line_waits(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    assert lines.read() == []
    file.write_text('{"step": 1}\n{"step": 2')
    assert lines.read() == [{"step": 1}]
    with file.open("a") as more:
        more.write("2}\nnot json\n[1]\n\n")
    assert lines.read() == [{"step": 1}, {"step": 22}]
    assert lines.unreadable == 2


def test_a_file_that_was_written_anew_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    lines = JsonLines(file)
    lines.read()
    (tmp_path / "new").write_text('{"step": 7}\n{"step": 8}\n{"step": 9}\n')
    (tmp_path / "new").replace(file)
    assert [row["step"] for row in lines.read()] == [7, 8, 9]
    file.unlink()
    assert lines.read() == []


def test_a_broken_object_is_none(tmp_path):
    (tmp_path / "half").write_text('{"state": "run')
    (tmp_path / "list").write_text("[1]")
    assert [read_json(tmp_path / name) for name in ("half", "list", "absent")] == [{}, {}, {}]
