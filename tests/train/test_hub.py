"""A run pushes its result to a hub: here one that takes commits over HTTP as the real one does."""

import base64
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from made_runs import upweight, write_config

SOURCE = Path(__file__).parents[2] / "src"


class Hub(BaseHTTPRequestHandler):
    """Repositories that are made, and the files that commits put into them."""

    made: list[dict]
    files: dict[str, dict[str, bytes]]  # by branch
    tokens: set

    def do_GET(self):
        self.answer({"name": "me", "type": "user"} if self.path.endswith("whoami-v2") else {"siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers["Authorization"])
        address = f"http://127.0.0.1:{self.server.server_port}/me/model"
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self.answer({"url": address, "name": "me/model"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]})
        elif "/commit/" in self.path:
            branch = self.files.setdefault(self.path.rpartition("/")[2], {})
            lines = [json.loads(line) for line in body.splitlines()]
            branch |= {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.answer({"commitUrl": f"{address}/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self.answer({})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    handler = type("OneHub", (Hub,), {"made": [], "files": {}, "tokens": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


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
    assert "hub_model_id: there is no repository to push to: " in done.stderr
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
