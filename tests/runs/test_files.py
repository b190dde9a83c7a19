"""Files that grow, are cut off or are written anew."""

from upweight.runs.files import JsonLines, no_run_in, no_such_run, read_json


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


def test_configs_are_named_where_one_is_asked_for(tmp_path):
    (tmp_path / "config.yaml").write_text("rl: dpo\n")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    config = tmp_path / "config.yaml"
    assert f"Did you mean '{config}'?" in no_such_run(tmp_path / "conf.yaml", "config or run")
    assert str(config) not in no_such_run(tmp_path / "conf.yaml")


def test_many_runs_are_counted(tmp_path):
    for number in range(10):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "run.json").write_text("{}")
    assert no_such_run(tmp_path / "other").endswith(f"{tmp_path / 'run7'} and 2 more.")


def test_commands_quote_folders(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "config.yaml").write_text("rl: dpo\n")
    assert f"`upweight doctor '{folder / 'config.yaml'}'`" in no_run_in(folder)
