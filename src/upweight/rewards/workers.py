"""Worker processes as the main process sees them: started when needed, ended when they hang or die, never waited on."""

import contextlib
import os
import pickle
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from upweight.errors import UserError
from upweight.processes import signal_group
from upweight.rewards.answers import Broken, Failure, Outcome
from upweight.rewards.worker import Source
from upweight.user_modules import place

GRACE = 5.0  # seconds beyond its limit after which a process that did not end itself is ended
START_LIMIT = 300.0  # seconds for a process to start and import a function's module
STALLED = 60  # seconds that one message may stand still half sent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Worker:
    """One process that calls reward functions; a fresh one takes the place of one that is lost."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115
        self._loaded: set[Source] = set()

    def call(self, source: Source, job: bytes, limit: float) -> Outcome:
        """Call a function with a pickled job, for at most `limit` seconds."""
        if source not in self._loaded or self._process is None:
            loaded = self._ask(source, START_LIMIT, None)
            if loaded is not None:
                reason = loaded.message if isinstance(loaded, Broken) else getattr(loaded, "reason", "")
                raise UserError(f"a worker process cannot import reward '{source[0]}.{source[1]}': {reason}")
            self._loaded.add(source)
        outcome = self._ask(source, limit, job)
        assert outcome is not None
        return outcome

    def kill(self) -> None:
        """End the process for good; whoever waits for an answer hears of it, and `clean` comes after."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                signal_group(self._process.pid, signal.SIGKILL)

    def clean(self) -> None:
        """Let go of a process that nobody waits for."""
        with self._lock:
            self._end()

    def _ask(self, source: Source, limit: float, job: bytes | None) -> Outcome | None:
        start = time.perf_counter()
        with self._lock:
            if self._closed:
                return Failure("stuck", "the rewards were closed")
            connection = self._connection or self._start()
        try:
            connection.send_bytes(pickle.dumps((source, limit, job)))
            if connection.poll(limit + GRACE):
                return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return self._lost(limit, time.perf_counter() - start, hung=False)
        return self._lost(limit, time.perf_counter() - start, hung=True)

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", STALLED, 0))
        os.ftruncate(self._trace.fileno(), 0)
        paths = [*sys.path, *([] if os.getcwd() in sys.path else [os.getcwd()])]
        code = (
            f"import sys; sys.path[:] = {paths!r}; from upweight.rewards.worker import serve; "
            f"serve({theirs.fileno()}, {self._trace.fileno()}, {self.seed})"
        )
        # Its prints go to stderr, as stdout is for results. A session of its own: Ctrl-C reaches the main process
        # alone, and children that rewards leave behind can be ended with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **ONE_THREAD},
            pass_fds=(theirs.fileno(), self._trace.fileno()),
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._loaded.clear()
        return self._connection

    def _lost(self, limit: float, seconds: float, *, hung: bool) -> Failure:
        """End what is left of the process, and say how it was lost."""
        with self._lock:
            status = self._end(wait=0.0 if hung else 1.0)
        trace = os.pread(self._trace.fileno(), 1 << 16, 0).decode(errors="replace")
        where = place(_frames(trace))
        if hung or trace.startswith("Timeout"):
            return Failure("timed out", f"it took longer than {limit:g} seconds{where}", seconds)
        how = f"ended with status {status}" if status >= 0 else f"was killed by {_signal_name(-status)}"
        return Failure("died", f"its worker process {how}{where}", seconds)

    def _end(self, wait: float = 0.0) -> int:
        """End the process and its group; the status it left with."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is None or connection is None:
            return 0
        deadline = time.monotonic() + wait
        # Not reaped before its group is ended: until then nobody else can have its number.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while time.monotonic() < deadline and os.waitid(os.P_PID, process.pid, look) is None:
            time.sleep(0.01)
        signal_group(process.pid, signal.SIGKILL)
        connection.close()
        return process.wait()


def _frames(trace: str) -> list[tuple[str, int]]:
    """The frames of the thread that answers requests, outermost first, from what faulthandler wrote."""
    for thread in trace.split("\n\n"):
        found = FRAME.findall(thread)
        if any(name == "serve" for _, _, name in found):
            return [(file, int(line)) for file, line, _ in reversed(found)]
    return []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


Work = Callable[[Worker], Any]


class Lanes:
    """Threads that take work in the order it came, each with a worker process to do it in."""

    def __init__(self, count: int) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self.workers = [Worker(1000 * rank + number) for number in range(count)]
        self._owner = os.getpid()
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._queue, worker), daemon=True) for worker in self.workers
        ]
        for thread in self._threads:
            thread.start()

    def put(self, work: Work) -> "Future[Any]":
        """Do some work when a lane is free."""
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """End the threads and their processes; work that nobody began is cancelled."""
        if os.getpid() != self._owner:
            return  # a fork of the main process, which has neither
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[1].cancel()
        for worker in self.workers:
            self._queue.put(None)
            worker.kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GRACE)


def _run(work: "queue.SimpleQueue[tuple[Work, Future[Any]] | None]", worker: Worker) -> None:
    while (item := work.get()) is not None:
        todo, future = item
        try:
            future.set_result(todo(worker))
        except BaseException as error:  # handed to whoever asked for the result
            future.set_exception(error)
        del item, todo, future  # else an idle lane would keep alive what it last worked for
    worker.clean()
