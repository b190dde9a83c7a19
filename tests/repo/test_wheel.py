"""The wheel in an environment of its own: nothing of the source tree is needed to train."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from made_runs import metrics_of, write_config, write_model

ROOT = Path(__file__).parents[2]


def run(*command, cwd=ROOT):
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=known, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_helps_validates_and_trains(tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    # The libraries of this environment, but not its own install of the package: a .pth reads no further .pth files.
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        place / "bin" / "python",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    run(*pip, wheel)
    upweight, python = place / "bin" / "upweight", place / "bin" / "python"
    assert run(python, "-c", "import upweight; print(upweight.__file__)", cwd=tmp_path).startswith(str(site))

    assert "Train language models from feedback" in run(upweight, "--help", cwd=tmp_path)
    config = write_config(tmp_path, write_model(tmp_path / "model"), max_steps=2)
    assert run(upweight, "validate", config, cwd=tmp_path) == "ok\n"
    run(upweight, "train", config, cwd=tmp_path)
    assert [row["step"] for row in metrics_of(tmp_path / "out")] == [1, 2]
    assert (tmp_path / "out" / "report.html").is_file()
    assert run(upweight, "docs", "grpo", cwd=tmp_path) == (ROOT / "docs" / "grpo.md").read_text()
    run(upweight, "init", "grpo", tmp_path / "start", cwd=tmp_path)
    assert run(upweight, "validate", tmp_path / "start" / "config.yaml", cwd=tmp_path) == "ok\n"
