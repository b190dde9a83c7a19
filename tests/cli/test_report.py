"""`upweight report` and `upweight watch`."""

import pytest
import yaml
from typer.testing import CliRunner

from made_reports import write_run
from upweight.cli.app import app
from upweight.cli.report import run_watch, watch_text
from upweight.errors import UserError


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


def test_a_run_by_its_folder_or_its_config(tmp_path):
    run = write_run(tmp_path / "run")
    assert report(run).output.strip() == str(run / "report.html")
    config = tmp_path / "my.yaml"
    keys = {"base_model": "tiny", "rl": "dpo", "datasets": [{"path": "rows.jsonl", "type": "chatml.intel"}]}
    config.write_text(yaml.safe_dump({**keys, "output_dir": str(run)}))
    assert report(config, "--output", tmp_path / "mine.html").output.strip() == str(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").is_file()


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    write_run(tmp_path / "mine" / "out")
    above = tmp_path / "mine", f"nor the folder of a run.*Here are: {tmp_path / 'mine' / 'out'}"
    with pytest.raises(UserError, match=above[1]):
        watch_text([above[0]])
    for place, reason in (
        (tmp_path / "rows.jsonl", "name a run's folder"), (tmp_path / "absent", "no such run"), above
    ):  # fmt: skip
        with pytest.raises(UserError, match=reason):
            report(place)


def test_watching_what_is_not_there_yet_says_so(tmp_path, monkeypatch, capsys):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr("socketserver.BaseServer.serve_forever", interrupted)
    run_watch([tmp_path / "later"], port=None, open_it=False)
    shown = capsys.readouterr()
    assert "http://127.0.0.1:" in shown.out
    assert f"{tmp_path / 'later'}: there is no such run." in shown.err
