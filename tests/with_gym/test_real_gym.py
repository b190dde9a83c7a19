"""Training against the real servers of NeMo Gym, started by the run itself."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml

from made_gym import arithmetic_rows, synonym_rows, write_caller, write_rows
from upweight.config import load_config
from upweight.data.sources.open import open_entry, selected_datasets
from upweight.environments.nemo_gym.process import config_files, find_gym
from upweight.train.run import train

GYM = os.environ.get("UPWEIGHT_GYM_ENV", str(Path(__file__).parents[2] / ".cache" / "gym-env"))
SERVERS = [
    "resources_servers/reasoning_gym/configs/resources_only.yaml",
    "resources_servers/example_multi_step/configs/example_multi_step.yaml",
]
pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return write_caller(tmp_path_factory.mktemp("caller"))


def write_run(folder: Path, model: Path, **keys) -> Path:
    arithmetic = write_rows(folder / "arithmetic.jsonl", arithmetic_rows())
    synonyms = write_rows(folder / "synonyms.jsonl", synonym_rows())
    content = {
        "base_model": str(model), "rl": "grpo", "chat_template": "tokenizer_default",
        "nemo_gym_enabled": True, "nemo_gym_dir": GYM, "nemo_gym_config_paths": SERVERS, "nemo_gym_max_turns": 4,
        "nemo_gym_datasets": [
            {"path": str(arithmetic), "server_name": "reasoning_gym"},
            {"path": str(synonyms), "server_name": "example_multi_step"},
        ],
        "learning_rate": 1e-3, "micro_batch_size": 16, "max_steps": 3, "logging_steps": 1,
        "trl": {"num_generations": 4, "max_completion_length": 160, "temperature": 1.5, "reward_funcs": ["reward_env"]},
        "output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def completions(folder: Path) -> list[dict]:
    files = sorted((folder / "out" / "completions").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def left_behind() -> str:
    found = subprocess.run(["pgrep", "-af", "upw-gym-|ng_run"], capture_output=True, text=True, check=False).stdout
    return "\n".join(line for line in found.splitlines() if "pgrep" not in line)


def test_two_servers_train_one_policy_and_nothing_is_left_behind(tmp_path, caller):
    train(load_config(write_run(tmp_path, caller), []))
    steps = [line for line in metrics(tmp_path) if "reward" in line]
    assert len(steps) == 3
    assert {"environment/reasoning_gym/reward", "environment/example_multi_step/reward"} <= {*steps[0], *steps[1]}
    assert all(line["environment/masked"] == 0 for line in steps)
    assert max(line["environment/turns_max"] for line in steps) > 1, "no tool was called"
    rows = completions(tmp_path)
    told = [message for row in rows for message in row["completion"] if message["role"] == "tool"]
    assert any(message["content"] == '{"synonym_value":711}' for message in told)
    by_server = {row["nemo_gym_server"]: row["rewards"] for row in rows}
    assert set(by_server) == {"reasoning_gym", "example_multi_step"}
    assert all(set(rewards) == {"reward_env"} for rewards in by_server.values())
    assert "on a read-only file system" in (tmp_path / "out" / "nemo_gym.log").read_text()
    assert not left_behind()


def test_a_server_that_is_killed_is_started_anew(tmp_path, caller):
    killed = []

    def kill_one() -> None:
        """As soon as completions are there, which a server has verified."""
        while not list((tmp_path / "out").glob("completions/*")):
            time.sleep(0.2)
        listed = subprocess.run(["pgrep", "-f", "^python app.py"], capture_output=True, text=True, check=True)
        for pid in map(int, listed.stdout.split()):
            if os.readlink(f"/proc/{pid}/cwd").endswith("resources_servers/reasoning_gym"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    train(load_config(write_run(tmp_path, caller, max_steps=6), []))
    thread.join(10)
    assert killed
    assert len([line for line in metrics(tmp_path) if "reward" in line]) == 6
    # Started twice: the launcher says each time what holds.
    assert (tmp_path / "out" / "nemo_gym.log").read_text().count("upweight: without network") == 2
    assert not left_behind()


def test_the_example_names_files_that_the_gym_has(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "gym" / "config.yaml"
    config = load_config(example, [f"nemo_gym_dir={GYM}"])
    files = config_files(config.gym, find_gym(GYM), config.folder)
    assert [Path(file).is_file() for file in files] == [True] * 3  # the agent's proxy comes by itself
    rows = [open_entry(row, key, config.folder).rows() for key, _, row in selected_datasets(config)]
    assert [len(one) for one in rows] == [5, 5]
