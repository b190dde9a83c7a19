"""Runs a vLLM server process: waits until it is ready, forwards signals, and cleans up after it."""

import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

import httpx

from upweight.errors import UserError
from upweight.log import logger
from upweight.processes import end_group, forwarded_signals, signal_group
from upweight.serve.command import Command

GRACE_SECONDS = 20.0  # seconds that a server has to exit by itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIND_VLLM = """
import importlib.metadata, importlib.util
spec = importlib.util.find_spec("vllm")
names = importlib.metadata.packages_distributions().get("vllm", []) if spec else []
print(importlib.metadata.version(names[0]) if names else "unknown" if spec else "")
"""


def installed_version(python: str) -> str:
    """Return the version of vLLM that an interpreter has installed."""
    try:
        result = subprocess.run([python, "-c", FIND_VLLM], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"--python: {python} cannot be run: {error}") from None
    version = result.stdout.strip()
    if not version:
        remedy = "pip install vllm there, or name the interpreter that has it with --python"
        raise UserError(f"vLLM is not installed in the environment of {python}: {remedy}")
    return version


def run_server(command: Command, url: str, ready: Callable[[], None]) -> int:
    """Run the server until it exits or a signal ends it; return its exit code. `ready` is called once it answers."""
    if is_healthy(url):
        raise UserError(f"something answers at {url} already; end it, or choose another port with vllm.port=...")
    sockets = tempfile.mkdtemp(prefix="vllm-")  # sockets between its processes, which vLLM does not remove
    env = {**os.environ, "VLLM_RPC_BASE_PATH": sockets, **command.env}
    # A new process group: the server's children can be killed with it, and nothing else.
    process = subprocess.Popen(command.argv, env=env, start_new_session=True)
    with forwarded_signals(SIGNALS, [process]) as signals:
        try:
            since, deadline, announced = time.monotonic(), math.inf, False
            while (code := process.poll()) is None:
                if not announced and not signals and is_healthy(url):
                    announced = True
                    ready()
                if not announced and time.monotonic() - since > 60:
                    since = time.monotonic()
                    logger.info("vLLM is still starting")
                if signals:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                if len(signals) > 1 or time.monotonic() > deadline:
                    signal_group(process.pid, signal.SIGKILL)
                time.sleep(0.5)
            return 0 if signals else code
        finally:
            end_group(process.pid)
            process.wait()
            shutil.rmtree(sockets, ignore_errors=True)


def is_healthy(url: str) -> bool:
    """Return whether a server answers its health check."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
