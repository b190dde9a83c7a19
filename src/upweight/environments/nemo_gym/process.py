"""The Gym's servers as a child process: start, end and log."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import IO

from upweight.config.sections.rollout import GymSection
from upweight.environments.nemo_gym.command import arguments, config_files, environment, find_gym, lacks_environments
from upweight.errors import UserError
from upweight.log import logger

GRACE = 20.0  # seconds in which servers may end by themselves
LOG, SOCKET = "nemo_gym.log", "socket"
NO_POLICY = ("http://127.0.0.1:9/v1", "policy")  # agents that nobody asks need not reach it


class GymProcess:
    """Servers in a separate process group, without network and on a read-only file system where that is possible.

    Verifiers run what the policy wrote. The group ends with this process, however that ends.
    """

    def __init__(self, gym: GymSection, folder: Path, log_folder: Path, *, policy: tuple[str, str] | None) -> None:
        """`folder` is the config's. `policy`: address and name of the model, which agents have to reach."""
        installed = find_gym(gym.folder)
        files = config_files(gym, installed, folder)
        needs = "agents reach vLLM over it" if policy else "packages have to be fetched"
        reachable = policy is not None or lacks_environments(installed, files)
        if gym.isolate and reachable:
            raise UserError(f"nemo_gym_isolate: the servers need a network: {needs}. Drop the key.")
        # Short: sockets in it have names of limited length. Not in the run's folder: that may be on a shared disk.
        self._work = Path(tempfile.gettempdir(), f"upw-gym-{uuid.uuid4().hex[:8]}")
        self._isolated = gym.isolate is not False and not reachable and _can_isolate()
        if gym.isolate and not self._isolated:
            raise UserError("nemo_gym_isolate: the system allows no namespaces here. Drop the key.")
        if gym.isolate is None and not self._isolated:
            logger.warning(
                "warning: the Gym's servers run with the network and the rights of this user, and run what the policy "
                "writes: %s", needs if reachable else "the system allows no namespaces"
            )  # fmt: skip
        self._command = partial(arguments, gym, installed, files, self._work, policy or NO_POLICY)
        self._cwd = installed.root if installed.is_clone else self._work
        self._installed = installed
        self.log = log_folder / LOG
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str | None:
        """The file through which servers without a network are reached."""
        return str(self._work / SOCKET) if self._isolated else None

    def spawn(self) -> None:
        """Start the servers; they need a while until they answer."""
        self._work.mkdir(mode=0o700, exist_ok=True)
        (self._work / SOCKET).unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "ab") as log:
            variables = environment(self._installed, self._work, os.environ, clean=self._isolated)
            self._process = _launched(
                self._command(), variables, self._cwd, self._work, isolated=self._isolated, output=log
            )

    def ended(self) -> bool:
        """Whether the servers are gone."""
        return self._process is None or self._process.poll() is not None

    def end(self) -> None:
        """End the servers by SIGINT, and kill them after a while."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(GRACE + 15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def remove(self) -> None:
        """Remove the files of the servers, except the log."""
        shutil.rmtree(self._work, ignore_errors=True)

    def last_log_line(self) -> str:
        """The last line of the log that is not empty."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")[:300]


def _can_isolate() -> bool:
    """Whether the system lets a process leave the network."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "ab") as nothing:
        place, command = Path(folder), [sys.executable, "-c", ""]
        tried = _launched(command, dict(os.environ), place, place, isolated=True, output=nothing)
        return tried.wait() == 0


def _launched(
    argv: list[str], variables: dict[str, str], cwd: Path, work: Path, *, isolated: bool, output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """A program under the launcher, which ends it when its stdin is closed."""
    request = {
        "argv": argv,
        "env": variables,
        "cwd": str(cwd),
        "socket": str(work / SOCKET) if isolated else None,
        "grace": GRACE,
        "isolated": isolated,
        "folder": str(work),
    }
    command = [sys.executable, "-m", "upweight.environments.nemo_gym.launcher", json.dumps(request)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
