"""The process between a run and its servers: what they may do, and that nothing of them is left."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from made_gym_server import wait_until

SERVER = """
import http.server, socket, subprocess, sys
from pathlib import Path

subprocess.Popen(["sleep", "600.25"], start_new_session=True)
try:
    Path(sys.argv[1]).touch()
    wrote = True
except OSError:
    wrote = False
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2])), 2).close()
    reached = True
except OSError:
    reached = False

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = repr((wrote, reached)).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

Path("here").touch()
http.server.HTTPServer(("127.0.0.1", 23456), Handler).serve_forever()
"""


def launched(work: Path, outside: Path, port: int) -> subprocess.Popen:
    request = {
        "argv": [sys.executable, "-c", SERVER, str(outside), str(port)], "env": dict(os.environ), "cwd": str(work),
        "socket": str(work / "socket"), "grace": 5.0, "isolated": True, "folder": str(work),
    }  # fmt: skip
    command = [sys.executable, "-m", "upweight.environments.nemo_gym.launcher", json.dumps(request)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def sleepers() -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(place)] if place.read_bytes() == b"sleep\x00600.25\x00" else []
        except OSError:
            continue
    return found


@pytest.fixture
def work():
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="upw-") as folder:
        yield Path(folder)


def test_servers_reach_nothing_write_nothing_and_end_with_the_run(work, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = sleepers()
        process = launched(work, tmp_path / "outside", listening.getsockname()[1])
        assert process.stdout is not None
        assert process.stdin is not None
        first = process.stdout.readline().decode()
        if "cannot isolate" in first:
            pytest.skip(first)
        wait_until(lambda: (work / "here").exists() and (work / "socket").exists())
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(work / "socket"))) as client:
            wait_until(lambda: client.get("http://127.0.0.1:23456/").status_code == 200)
            wrote, reached = eval(client.get("http://127.0.0.1:23456/").text)
            assert client.get("http://127.0.0.1:23457/").status_code == 521  # nobody listens there
        assert not reached
        assert wrote == ("read-only" not in first)
        assert len(sleepers()) == len(before) + 1
        process.stdin.close()
        process.wait(20)
    assert len(sleepers()) == len(before)
    assert not Path(f"/proc/{process.pid}").exists()
