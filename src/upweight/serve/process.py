"""Start a server, say when it is ready, pass signals on, and leave nothing of it behind."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import FrameType

import httpx

from upweight.errors import UserError
from upweight.log import logger
from upweight.serve.command import Command

GRACE = 20.0  # seconds that a server has to end by itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIND = """
import importlib.metadata, importlib.util
found = importlib.util.find_spec("vllm")
names = importlib.metadata.packages_distributions().get("vllm", []) if found else []
print(importlib.metadata.version(names[0]) if names else "unknown" if found else "")
"""


def installed_version(python: str) -> str:
    """The version of vLLM in the environment of an interpreter."""
    try:
        found = subprocess.run([python, "-c", FIND], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"--python: {python} cannot be run: {error}") from None
    version = found.stdout.strip()
    if not version:
        raise UserError(
            f"vLLM is not installed in the environment of {python}: pip install vllm there, or name the interpreter of "
            "the environment that has it with --python"
        )
    return version


def run_server(command: Command, url: str, ready: Callable[[], None]) -> int:
    """Run the server until it ends or a signal ends it; its exit code. `ready` is called once it answers."""
    if answers(url):
        raise UserError(f"something answers at {url} already; end it, or choose another port with vllm.port=...")
    sockets = tempfile.mkdtemp(prefix="vllm-")  # through which its processes talk: vLLM does not remove them
    env = {**os.environ, "VLLM_RPC_BASE_PATH": sockets, **command.env}
    # A group of its own: what the server starts can be ended with it, and nothing else.
    process = subprocess.Popen(command.argv, env=env, start_new_session=True)
    ending: list[float] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if ending and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        ending.append(time.monotonic())
        if process.poll() is None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        said, announced = time.monotonic(), False
        while (code := process.poll()) is None:
            if not announced and not ending and answers(url):
                announced = True
                ready()
            if not announced and time.monotonic() - said > 60:
                said = time.monotonic()
                logger.info("vLLM is still starting")
            if ending and time.monotonic() - ending[0] > GRACE:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.5)
        return 0 if ending else code
    finally:
        end_group(process.pid)
        process.wait()
        shutil.rmtree(sockets, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def answers(url: str) -> bool:
    """Whether a server is there and well."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def end_group(group: int, grace: float = 5.0) -> None:
    """End every process of a group: asked first, made to after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _sent(group, number):
            return
        stop = time.monotonic() + grace
        while time.monotonic() < stop:
            if not _sent(group, 0):
                return
            time.sleep(0.1)


def _sent(group: int, number: int) -> bool:
    """Whether there is anyone in a group to send a signal to."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
