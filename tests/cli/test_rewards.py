"""`upweight rewards` as a person and as a program run it."""

import json

from typer.testing import CliRunner

from made_runs import write_online
from upweight.cli.app import app


def tried(*arguments: str, code: int = 0):
    done = CliRunner().invoke(app, ["rewards", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def test_a_file_of_completions_as_a_table_and_as_json(tmp_path):
    config = str(write_online(tmp_path, tmp_path / "none"))
    rows = [{"prompt": "p", "completion": text} for text in ("aeiou", "[bold]x", "zzz")]
    file = tmp_path / "written.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = tried(config, "--completions", str(file))
    assert "3 completions of 1 prompt " in " ".join(shown.split())
    assert 'vowels, best 0.8333: "aeiou"' in shown
    assert "Every reward separates completions." in shown
    plain = json.loads(tried(config, "--completions", str(file), "--json"))
    assert plain["rewards"][0]["highest"] == plain["rewards"][0]["best"][0]["score"]
    assert plain["remarks"] == []
    assert plain["works"] is True
    flat = tried(config, "trl.reward_funcs=[debug]", "--completions", str(file), code=1)
    assert "reward 'debug' gives 1 to every completion" in flat
    failing = "import math\ndef roots(completions):\n    return [math.sqrt(-1) for _ in completions]\n"
    (tmp_path / "failing_rewards.py").write_text(failing)
    arguments = (config, "trl.reward_funcs=[failing_rewards.roots]", "--completions", str(file))
    assert "always fails" in tried(*arguments, code=1)
    assert json.loads(tried(*arguments, "--json", code=1))["works"] is False
