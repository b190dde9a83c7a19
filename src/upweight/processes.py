"""Processes, process groups, signals and ports. Light to import, since reward workers start with it."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

PARENT_CHECK_SECONDS = 1.0
COLLECTED_AFTER = 20_000  # new objects of a process that encodes rows; few of them are in circles


def signal_group(group: int, number: int) -> bool:
    """Send a signal to every process of a group; return whether the group exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_group(group: int, grace: float = 5.0) -> None:
    """Terminate every process of a group, and kill it after `grace` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not signal_group(group, number):
            return
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            if not signal_group(group, 0):
                return
            time.sleep(0.1)


def end_this_group() -> NoReturn:
    """Kill this process, and its whole group where it leads one."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def keep_pages_shared() -> None:
    """Keep what a forked process has from its parent out of garbage collections, which write to every object's page."""
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER)


def end_with_parent() -> None:
    """Kill this process, and the group that it leads, when its parent has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        end_this_group()

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def forwarded_signals(
    numbers: Sequence[signal.Signals], processes: Sequence["subprocess.Popen[bytes]"]
) -> Iterator[list[int]]:
    """Forward signals to the processes meanwhile; yield the list of the signals that were received."""
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port at an address of this machine."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def process_ids() -> list[int]:
    """Return the ids of all processes, or an empty list where the system has no /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def is_alive(pid: object, begun: str | None = None) -> bool:
    """Whether a process runs; `begun`, its start time, tells it from a later process with the same id."""
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it runs as another user
        pass
    state, _, since = stat_of(pid)
    same = since is None or begun in (None, since)
    return state != "Z" and same  # an ended process stays until its parent waits for it


def start_ticks(pid: int) -> str | None:
    """Return the start time of a process in the system's clock ticks, since its id alone may be reused."""
    return stat_of(pid)[2]


def stat_of(pid: int) -> tuple[str | None, int | None, str | None]:
    """Return a process's state, parent id and start time, or None for each where the system has no such file."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None, None, None
    return fields[0], int(fields[1]), fields[19]
