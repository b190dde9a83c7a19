"""A real OpenEnv server on loopback, from the environments in `served.py`."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

HERE = Path(__file__).parent
PYTHON = os.environ.get("UPWEIGHT_OPENENV_PYTHON", str(HERE.parents[1] / ".cache" / "openenv-env" / "bin" / "python"))
STARTING = 120  # seconds


class RealServer:
    """One uvicorn after the other, on one port."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [PYTHON, "-m", "uvicorn", f"served:{self.name}", "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        stop = time.monotonic() + STARTING
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).is_success:
                    return
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < stop, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """End it at once, in the middle of what it does."""
        self.process.kill()
        self.process.wait(30)


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[RealServer]:
    """A server that is ready, and ended afterwards."""
    server = RealServer(name, folder / f"{name}.log")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()
