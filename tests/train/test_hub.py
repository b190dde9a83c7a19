"""A run pushes its result to a hub: here one that takes commits over HTTP as the real one does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from made_hub import opened_hub
from made_runs import upweight, write_config

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def hub():
    with opened_hub() as server:
        yield server


@pytest.mark.slow
def test_the_model_and_its_card_are_pushed(hub, model_folder, tmp_path):
    keys = {"hub_model_id": "me/model", "hub_private_repo": True, "adapter": "lora", "lora_target_linear": True}
    file = write_config(tmp_path, model_folder, max_steps=1, num_epochs=None, save_strategy="no", **keys)
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_own", "HF_HUB_OFFLINE": "0"}
    environment = os.environ | own | {"PYTHONPATH": str(SOURCE), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "upweight", "train", str(file)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    taken = hub.RequestHandlerClass
    assert [repository["name"] for repository in taken.made] == ["model"]
    assert "private" in (*taken.made[0], *taken.made[0].values())  # spelt by version
    assert taken.tokens == {"Bearer hf_own"}
    (files,) = taken.files.values()
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files.keys()
    assert files["adapter_model.safetensors"] == (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert "# model" in card
    assert "| loss |" in card
    assert str(tmp_path) not in card


def test_a_repository_that_cannot_be_made_is_said_before_training(model_folder, tmp_path):
    file = write_config(tmp_path, model_folder, max_steps=1, num_epochs=None, hub_model_id="me/model")
    done = upweight("train", file, folder=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 2, done.stderr
    assert "hub_model_id: there is no repository to push to: the hub is not asked, as HF_HUB_OFFLINE" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_given_up_after_the_limit(tmp_path):
    file = write_config(tmp_path, tmp_path / "model", base_model="nobody/nothing", hub_timeout=1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = os.environ | {"PYTHONPATH": str(SOURCE), "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}
        env |= {"HF_HUB_OFFLINE": "0", "UPWEIGHT_HEARTBEAT": "0.5"}
        command = [sys.executable, "-m", "upweight", "train", str(file), "--quiet"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2, done.stderr
    assert "asking the hub (hub_timeout)" in done.stderr
    assert f"the hub ({address}) cannot be reached" in done.stderr
    assert "it is not on this machine, and the hub is not asked" in done.stderr
    assert "Traceback" not in done.stderr
