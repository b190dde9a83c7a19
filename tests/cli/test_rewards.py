"""`upweight rewards` as a person and as a program run it."""

import json

from typer.testing import CliRunner

from made_runs import write_online
from upweight.cli.app import app


def tried(*arguments: str):
    done = CliRunner().invoke(app, ["rewards", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_file_of_completions_as_a_table_and_as_json(tmp_path):
    config = str(write_online(tmp_path, tmp_path / "none"))
    rows = [{"prompt": "p", "completion": text} for text in ("aeiou", "[bold]x", "zzz")]
    file = tmp_path / "written.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = tried(config, "--completions", str(file))
    assert "3 completions of 1 prompts" in shown
    assert 'vowels, best 0.8333: "aeiou"' in shown
    assert "Every reward separates completions." in shown
    plain = json.loads(tried(config, "--completions", str(file), "--json"))
    assert plain["rewards"][0]["highest"] == plain["rewards"][0]["best"][0]["score"]
    assert plain["remarks"] == []
    flat = tried(config, "trl.reward_funcs=[debug]", "--completions", str(file))
    assert "reward 'debug' gives 1 to every completion" in flat
