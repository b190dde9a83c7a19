"""A sweep as a person runs it: killed in the middle and started again, nothing is trained twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from made_runs import upweight, write_config

SOURCE = Path(__file__).parents[2] / "src"


def table_of(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_sweep_goes_on(model_folder, tmp_path):
    config = write_config(
        tmp_path, model_folder, num_epochs=None, max_steps=6, save_steps=2, val_set_size=4, eval_steps=6
    )
    command = [sys.executable, "-m", "upweight", "sweep", str(config), "learning_rate=1e-4,1e-3", "seed=1,2"]
    folder = tmp_path / "out" / "sweep"
    first, second = folder / "learning_rate_1e-4__seed_1", folder / "learning_rate_1e-4__seed_2"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    sweep = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (second / "checkpoint-2" / "trainer_state.json").exists():
        assert time.monotonic() < deadline
        assert sweep.poll() is None
        time.sleep(0.05)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    before = (first / "metrics.jsonl").stat().st_mtime_ns
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-f", str(second)], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < deadline, "the trial ends with its sweep"
        time.sleep(0.2)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    assert (first / "metrics.jsonl").stat().st_mtime_ns == before, "what is done is not done again"
    table = table_of(folder)
    assert [(trial["state"], trial["steps"]) for trial in table["trials"]] == [("done", 6)] * 4
    assert table["metric"] == "eval_loss"
    assert table["best"].startswith("learning_rate_1e-3")
    assert done.stdout.strip().endswith("sweep.html")
    again = upweight("sweep", config, "learning_rate=1e-4,1e-3", "seed=1,2", "--show", "--json")
    assert json.loads(again.stdout) == table


def test_a_failed_trial_is_named_and_the_others_go_on(model_folder, tmp_path):
    config = write_config(tmp_path, model_folder, num_epochs=None, max_steps=1)
    done = upweight(
        "sweep", config, "base_model=" + f"{tmp_path / 'nothing'},{model_folder}", "--output", tmp_path / "s"
    )
    assert done.returncode == 1, done.stderr
    assert "failed (exit 2)" in done.stderr
    assert [trial["state"] for trial in table_of(tmp_path / "s")["trials"]] == ["failed", "done"]


def test_a_wrong_key_ends_it_before_training(model_folder, tmp_path):
    config = write_config(tmp_path, model_folder)
    done = upweight("sweep", config, "learning_rat=1,2")
    assert done.returncode == 2
    assert "Did you mean 'learning_rate'" in done.stderr
    assert not (tmp_path / "out").exists()
