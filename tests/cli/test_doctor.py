"""`upweight doctor` as a person and as a program run it."""

import json
import subprocess
import sys

from typer.testing import CliRunner

from made_health import HEALTHY, run_of
from made_runs import write_model, write_online
from upweight.cli.app import app


def doctor(*arguments):
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return done.exit_code, done.stdout


def test_a_machine_alone_and_a_config(tmp_path):
    code, shown = doctor()
    assert code == 0
    assert "versions: Python" in shown
    file = write_online(tmp_path, write_model(tmp_path / "model"))
    code, shown = doctor(file)
    assert (code, shown.splitlines()[-1]) == (0, "nothing is wrong")
    code, shown = doctor(file, "trl.reward_funcs=[nowhere.right]")
    assert code == 1
    assert "ALARM   rewards:" in shown


def test_a_run_as_json(tmp_path):
    rows = run_of({**HEALTHY, "kl": 9.0}, steps=40)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, shown = doctor(tmp_path, "--json")
    assert code == 1
    plain = json.loads(shown)
    (sick,) = [one for one in plain["findings"] if one["what"] == "kl explosion"]
    assert plain["wrong"] == len([one for one in plain["findings"] if one["level"] in ("warning", "alarm")])
    assert (sick["evidence"]["metric"], sick["evidence"]["value"], sick["evidence"]["threshold"]) == ("kl", 9.0, 2.0)
    assert "trl.beta" in sick["remedy"]


def test_a_folder_with_a_config_that_is_no_run_names_its_runs(tmp_path):
    (tmp_path / "config.yaml").write_text("rl: sft\n")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    said = str(CliRunner().invoke(app, ["doctor", str(tmp_path)]).exception)
    assert "neither a config nor the folder of a run" in said
    assert f"Here are: {tmp_path / 'out'}. To check the config: `upweight doctor {tmp_path / 'config.yaml'}`." in said


def test_nothing_there_is_said(tmp_path):
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert "neither a config nor the folder of a run" in str(done.exception)
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "nothing")])
    assert "there is no such config or run." in str(done.exception)


def test_a_run_is_judged_without_what_computes(tmp_path):
    rows = run_of(HEALTHY, steps=40)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(write_online(tmp_path, tmp_path / "model").read_text())
    code = (
        f"import sys; from upweight.cli import doctor; doctor.run({str(tmp_path)!r}, [], as_json=False);"
        "print([m for m in ('torch', 'transformers', 'datasets', 'peft', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["nothing is wrong", "[]"]
