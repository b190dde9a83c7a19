"""Runs an untrusted Python program in a separate process, limited and isolated as far as the system allows."""

import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from upweight.processes import process_ids, signal_group, stat_of

_HERE = Path(__file__).parent
_REPORT_BYTES = 1_000_000
ISOLATION_LEVELS = ("root", "user", "plain")  # of isolating, strongest first; the first that the system allows is used


class SandboxError(Exception):
    """The sandbox itself could not be set up; says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    """What a program may use: seconds of wall and CPU time, bytes of memory, files and output, processes."""

    seconds: float = 10.0
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 16 * 2**20
    disk_bytes: int = 64 * 2**20
    output_bytes: int = 2**20
    processes: int = 16


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program: whether it exited with 0, its output, the passed tests, and the isolation in effect."""

    ended_well: bool
    stdout: str
    held: list[bool] | None
    isolation: tuple[str, ...]
    reason: str = ""


def run_program(
    code: str, *, tests: list[str] | None, stdin: str, limits: Limits, ways: tuple[str, ...] = ISOLATION_LEVELS
) -> ProgramResult:
    """Code, tests to run after it or None, and its stdin -> the outcome; every process it started is gone by then."""
    token = secrets.token_hex(16)
    folder = os.path.realpath(tempfile.mkdtemp(prefix="upweight-code-"))
    reading, writing = os.pipe()
    request = {
        **vars(limits),
        "payload.json": json.dumps({"code": code, "tests": tests, "token": token, "report": writing}),
        "stdin": stdin,
        "folder": folder,
        "home": os.path.realpath(os.path.expanduser("~")),
        "keep": _interpreter_folders(),
        "program": str(_HERE / "program.py"),
        # A number no account has, and no other run at the same time.
        "spare_user": 1_000_000_000 + secrets.randbelow(1_000_000_000),
        "ways": ways,
    }
    try:
        process = _launch_program(request, writing, token)
        report = b""
        try:
            (stdout, report, stderr), reason = _read_output(process, reading, limits)
        finally:
            line, *more = report.splitlines() or [b""]
            ready = json.loads(line) if line.startswith(b"{") and line.endswith(b"}") else None
            _kill_program(process, ready, token)
    finally:
        os.close(reading)
        _remove_folder(folder)
    stderr_tail = stderr.decode(errors="replace").strip()[-400:]
    if ready is None:
        raise SandboxError(f"it did not start: {reason or stderr_tail}")
    return ProgramResult(
        ended_well=not reason and process.returncode == 0,
        stdout=stdout.decode(errors="replace"),
        held=_tests_passed(more, token) if not reason else None,
        isolation=tuple(ready["holds"]),
        reason=reason or stderr_tail,
    )


def _remove_folder(folder: str) -> None:
    """Remove a folder, also if the program removed permissions in it."""
    with suppress(OSError, RecursionError):  # a folder that is nested too deeply stays, which is better than no score
        for parent, names, _ in os.walk(folder):
            for path in (os.path.join(parent, name) for name in names):
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder)


def _interpreter_folders() -> list[str]:
    """The folders the program needs to see: this interpreter, each link on the way to it, its packages, this one."""
    folders = {sys.prefix, sys.base_prefix, os.path.dirname(sys.executable), str(_HERE)}
    path = sys.executable
    while os.path.islink(path):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
        folders.add(os.path.dirname(os.path.dirname(path)))
    folders |= {os.path.realpath(folder) for folder in folders}
    return sorted(os.path.normpath(folder) for folder in folders if folder not in ("", "/"))


def _launch_program(request: dict, writing: int, token: str) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "UPWEIGHT_SANDBOX": token}
    environment |= dict.fromkeys(("HOME", "TMPDIR"), request["folder"])
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    try:
        with tempfile.TemporaryFile() as request_file:
            request_file.write(json.dumps(request).encode())
            request_file.seek(0)
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HERE / "launch.py"), str(writing)],
                stdin=request_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=request["folder"],
                pass_fds=[writing],
                start_new_session=True,
            )
    finally:
        os.close(writing)


def _read_output(process: subprocess.Popen[bytes], reading: int, limits: Limits) -> tuple[list[bytes], str]:
    """Read the program's output until it ends, exceeds a limit or times out; return the output and the reason."""
    assert process.stdout is not None
    assert process.stderr is not None
    sources = [process.stdout.fileno(), reading, process.stderr.fileno()]
    most = {sources[0]: limits.output_bytes, sources[1]: _REPORT_BYTES, sources[2]: limits.output_bytes}
    output = {source: bytearray() for source in sources}
    deadline = time.monotonic() + limits.seconds
    reason = ""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            os.set_blocking(source, False)
            selector.register(source, selectors.EVENT_READ)
        while not reason:
            ended = process.poll() is not None
            ready = selector.select(0 if ended else 0.02)
            for key, _ in ready:
                with suppress(BlockingIOError):
                    block = os.read(key.fd, 65536)
                    output[key.fd] += block
                    if not block:
                        selector.unregister(key.fd)
                if len(output[key.fd]) > most[key.fd]:
                    reason = "wrote more output than allowed"
            if ended and not ready:
                break
            if time.monotonic() > deadline:
                reason = "ran out of time"
            elif not ended and _memory_of(_with_children(process.pid)) > limits.memory_bytes:
                reason = "used more memory than allowed"
    return [bytes(output[source][: most[source]]) for source in sources], reason


def _with_children(process: int) -> list[int]:
    """Return a process and all that descend from it; where the system does not list children, only itself."""
    processes = [process]
    for number in processes:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{number}/task"):
                processes += map(int, Path(f"/proc/{number}/task/{thread}/children").read_text().split())
    return processes


def _memory_of(processes: list[int]) -> int:
    """Return the bytes that processes hold together, files in memory included; the kernel limits each by itself."""
    resident, files = 0, {}
    for process in processes:
        with suppress(OSError):
            resident += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for name in os.listdir(folder := f"/proc/{process}/fd"):
                if os.readlink(f"{folder}/{name}").startswith("/memfd:"):
                    state = os.stat(f"{folder}/{name}")
                    files[state.st_ino] = state.st_blocks * 512
    return resident + sum(files.values())


def _kill_program(process: subprocess.Popen[bytes], ready: dict | None, token: str) -> None:
    """Kill the launcher and everything the program started, and reap."""
    with process:  # which closes its pipes and waits
        signal_group(process.pid, signal.SIGKILL)
    if ready is not None:
        if ready["holds"][0] != "plain":
            return  # with a PID namespace the kernel has done it
        signal_group(ready["pid"], signal.SIGKILL)
    # What left the launcher's group is known by the spare user, or by the mark in its environment.
    spare = ready["user"] if ready is not None and "spare-user" in ready["holds"] else None
    mark = f"UPWEIGHT_SANDBOX={token}".encode()
    for _ in range(20):
        remaining = [number for number in process_ids() if _belongs_to_program(number, spare, mark)]
        for number in remaining:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        if not remaining:
            return
        time.sleep(0.02)


def _belongs_to_program(process: int, spare: int | None, mark: bytes) -> bool:
    try:
        if stat_of(process)[0] == "Z":
            return False
        if spare is not None:
            return os.stat(f"/proc/{process}").st_uid == spare
        return mark in Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return False


def _tests_passed(lines: list[bytes], token: str) -> list[bool] | None:
    """The report's lines -> which tests held, from the first line with our token."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict) and content.get("token") == token:
                return [bool(passed) for passed in content["held"]]
    return None
