"""A real vLLM server around a tiny model, started by `upweight vllm-serve`, and a proxy that misbehaves."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("UPWEIGHT_VLLM_PYTHON", str(ROOT / ".cache" / "vllm-env" / "bin" / "python"))
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
VISION = Path(PYTHON).parents[1] / "vision"  # torchvision and num2words, for the processors that need them
OPTIONS = ("vllm.enforce_eager=true", "vllm.dtype=float32", "vllm.gpu_memory_utilization=0.3")
STARTING = 400  # seconds


def with_torchvision() -> dict[str, str]:
    """The environment of a process that finds torchvision and num2words, in vLLM's environment and in the project's."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(VISION), os.environ.get("PYTHONPATH")]))}


class RealServer:
    """One run of `upweight vllm-serve` after the other, on one port."""

    def __init__(self, config: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        self.config, self.options, self.env = config, options, env or os.environ
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = config.parent / f"vllm-{self.port}.log"

    def start(self) -> None:
        command = [sys.executable, "-m", "upweight", "vllm-serve", str(self.config), f"vllm.port={self.port}", *OPTIONS]
        with self.log.open("w") as log:
            env = {**self.env, **ON_CPU}
            self.process = subprocess.Popen(
                [*command, *self.options, "--python", PYTHON], env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        stop = time.monotonic() + STARTING
        while "vLLM is ready" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < stop, self.log.read_text()[-3000:]
            time.sleep(0.5)

    def vllm(self) -> int:
        """The process that `vllm-serve` started; its number is that of its group too."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def kill(self) -> None:
        """End vLLM at once, in the middle of what it does."""
        os.kill(self.vllm(), signal.SIGKILL)
        self.process.wait(60)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def running(config: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[RealServer]:
    server = RealServer(config, *options, env=env)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    stats = [entry.read_text() for entry in Path("/proc").glob("[0-9]*/stat")]
    fields = [stat.rpartition(")")[2].split() for stat in stats]
    return not [one for one in fields if one[2] == str(group) and one[0] != "Z"]


@contextlib.contextmanager
def proxy(target: str, *, every: int, delay: float) -> Iterator[str]:
    """An address that passes on to `target`, late, and answers every n-th generation with an error instead."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.pass_on("GET", None)

        def do_POST(self):
            self.pass_on("POST", self.rfile.read(int(self.headers.get("content-length", 0))))

        def pass_on(self, method, body):
            if self.path == "/v1/completions":
                asked.append(self.path)
                time.sleep(delay)
            if self.path == "/v1/completions" and len(asked) % every == 0:
                status, content, kind = 500, b'{"error": {"message": "planted"}}', "application/json"
            else:
                headers = {"content-type": "application/json"}
                found = httpx.request(method, target + self.path, content=body, headers=headers, timeout=120)
                status, content = found.status_code, found.content
                kind = found.headers.get("content-type", "text/plain")
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
