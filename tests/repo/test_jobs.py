"""Job files use commands, options and files that exist; they cannot be run here."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from upweight.cli.app import app

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
TEXTS = [JOBS / "slurm.sh", JOBS / "skypilot.yaml", JOBS / "kubernetes.yaml"]
DOCKER = sorted((JOBS / "docker").glob("*.Dockerfile"))


def options_of(command: str) -> set[str]:
    return {name for parameter in vars(get_command(app))["commands"][command].params for name in parameter.opts}


@pytest.mark.parametrize("file", TEXTS, ids=lambda path: path.name)
def test_options_of_train_exist(file):
    ours = {"--resume", "--nodes", "--node-rank", "--master-address"}
    text = file.read_text()
    assert {word for word in re.findall(r"--[a-z-]+", text) if word in ours} <= options_of("train")
    assert "--resume" in text, "a job that is started again goes on"


def test_yaml_files_can_be_read():
    assert yaml.safe_load((JOBS / "skypilot.yaml").read_text())["run"]
    kinds = [part["kind"] for part in yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())]
    assert kinds == ["PersistentVolumeClaim", "Job"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_script_of_slurm_can_be_parsed():
    subprocess.run(["bash", "-n", str(JOBS / "slurm.sh")], check=True)


@pytest.mark.parametrize("file", DOCKER, ids=lambda path: path.name)
def test_what_images_copy_and_install_exists(file):
    text = file.read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'"\.\[([a-z,]+)\]"', text)
    assert set(wanted.split(",")) <= set(extras)
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)
