"""Starting a command as several ranks on this machine, and ending them together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PLACE = "UPWEIGHT_LAUNCHER"  # folder where a rank leaves what it wants the launcher to say
POLL = 0.1


def is_rank() -> bool:
    """Whether a launcher, ours or another, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `upweight ARGUMENTS` as so many ranks; the exit code, and what a user has to read, as from one process."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        ranks = [_start(arguments, rank, processes, folder, port) for rank in range(processes)]
        with _passed_on(ranks) as passed:
            try:
                return _wait(ranks, Path(folder), passed)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()


def say_through_launcher(text: str) -> None:
    """Leave an error for the launcher, which ends all ranks and prints it once; without our launcher, do nothing."""
    place = os.environ.get(PLACE)
    if place is None:
        return
    file = Path(place) / f"{os.environ['RANK']}.txt"
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
    time.sleep(60)  # the others would only see a lost connection, and say so


def end_with_launcher() -> None:
    """End this rank when the launcher that started it is gone."""
    if PLACE not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start(arguments: Sequence[str], rank: int, processes: int, folder: str, port: int) -> subprocess.Popen[bytes]:
    threads = str(max((os.cpu_count() or 1) // processes, 1))
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        PLACE: folder,
    }
    # A session of their own: the terminal's Ctrl-C would reach them twice.
    return subprocess.Popen(
        [sys.executable, "-m", "upweight", *arguments], env=os.environ | variables, start_new_session=True
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, passed: list[int]) -> int:
    """Wait until all are done or one has failed."""
    while True:
        said = sorted(folder.glob("*.txt"))
        if said:
            print(said[0].read_text(encoding="utf-8"), file=sys.stderr)
            return 2
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        # Stopped by a signal, they save together, and each may take its time.
        if failed and (not passed or None not in codes):
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(POLL)


@contextlib.contextmanager
def _passed_on(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Signals go to the ranks, which know how to end; yields the list of those passed on."""
    passed: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        passed.append(number)
        for rank in ranks:
            rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
