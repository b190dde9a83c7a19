"""Processes and their groups: who is there, signals, ends, ports. Light to import: rewards' processes start with it."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

LOOK_FOR_PARENT = 1.0  # seconds between two looks


def signal_group(group: int, number: int) -> bool:
    """Send a signal to every process of a group; whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_group(group: int, grace: float = 5.0) -> None:
    """End every process of a group: asked first, made to after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not signal_group(group, number):
            return
        stop = time.monotonic() + grace
        while time.monotonic() < stop:
            if not signal_group(group, 0):
                return
            time.sleep(0.1)


def end_this_group() -> NoReturn:
    """End this process, and where it leads its group the children in it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def end_with_parent() -> None:
    """Have this process end, and the group that it leads, when the one that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_FOR_PARENT)
        end_this_group()

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def passing_on(
    numbers: Sequence[signal.Signals], processes: Sequence["subprocess.Popen[bytes]"]
) -> Iterator[list[int]]:
    """Send signals that come meanwhile to the processes, which know how to end; yields the list of those that came."""
    came: list[int] = []

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port(host: str = "127.0.0.1") -> int:
    """A port at an address of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def process_numbers() -> list[int]:
    """The processes of this machine, where the system lists them."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def is_alive(pid: object, begun: str | None = None) -> bool:
    """Whether a process of this machine is there; where it is known when it began, whether it is the same one."""
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and another user's
        pass
    state, _, since = stat_of(pid)
    same = since is None or begun in (None, since)
    return state != "Z" and same  # one that has ended stays until its parent asks for it


def begun_at(pid: int) -> str | None:
    """When a process began, as the system counts: its number alone may go to another, as where a container restarts."""
    return stat_of(pid)[2]


def stat_of(pid: int) -> tuple[str | None, int | None, str | None]:
    """A process's state, its parent and when it began, where the system has a file that says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None, None, None
    return fields[0], int(fields[1]), fields[19]
