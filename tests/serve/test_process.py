"""Starting a server and leaving nothing behind, with a stand-in for vLLM."""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from upweight.errors import UserError
from upweight.processes import end_group, free_port
from upweight.serve import process
from upweight.serve.command import Command
from upweight.serve.process import installed_version, is_healthy, run_server

# Serves /health, and starts a child that does not end by itself and ignores being asked to.
STAND_IN = """
import http.server, os, signal, subprocess, sys
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
open(sys.argv[2], "w").write(f"{child.pid} {os.environ['FOR_THE_SERVER']} {os.environ['VLLM_RPC_BASE_PATH']}")
open(os.environ["VLLM_RPC_BASE_PATH"] + "/left", "w").close()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _less_grace(monkeypatch):
    monkeypatch.setattr(process, "end_group", partial(end_group, grace=1.0))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_says_when_it_is_ready_and_ends_with_its_children(tmp_path):
    port, file = free_port(), tmp_path / "child"
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, "-c", STAND_IN, str(port), str(file))
    seen = []

    def ready() -> None:
        seen.append(is_healthy(url))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

    before = signal.getsignal(signal.SIGTERM)
    assert run_server(Command(argv, {"FOR_THE_SERVER": "yes"}), url, ready) == 0
    assert seen == [True]
    child, told, sockets = file.read_text().split()
    assert told == "yes"
    assert not Path(sockets).exists()
    assert not alive(int(child))
    assert not is_healthy(url)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_server_that_fails_hands_on_its_exit_code():
    argv = (sys.executable, "-c", "raise SystemExit(7)")
    assert run_server(Command(argv), f"http://127.0.0.1:{free_port()}", lambda: None) == 7


def test_a_port_that_is_taken_is_named(tmp_path):
    port, file = free_port(), tmp_path / "child"
    url = f"http://127.0.0.1:{port}"
    argv = (sys.executable, "-c", STAND_IN, str(port), str(file))

    def ready() -> None:
        with pytest.raises(UserError, match=r"answers at .* already"):
            run_server(Command(argv), url, lambda: None)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

    run_server(Command(argv, {"FOR_THE_SERVER": "yes"}), url, ready)


def test_an_empty_group_is_no_matter():
    began = time.monotonic()
    end_group(2**22 - 1)
    assert time.monotonic() - began < 5


def test_an_environment_without_vllm_is_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match="vLLM is not installed in the environment of"):
        installed_version(str(bare))
    with pytest.raises(UserError, match="cannot be run"):
        installed_version(str(tmp_path / "nothing"))
