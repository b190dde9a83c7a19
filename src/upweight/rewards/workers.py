"""Worker processes of rewards: started when needed, and replaced when they hang or die; they import nothing heavy."""

import contextlib
import faulthandler
import importlib
import operator
import os
import pickle
import queue
import random
import re
import secrets
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
from pathlib import Path
from threading import Thread
from typing import Any

from upweight.errors import UserError
from upweight.event_loop import settle
from upweight.processes import end_this_group, end_with_parent, signal_group
from upweight.rewards.invoke import Function, RewardFailure, RewardOutcome, failed, invoke
from upweight.user_modules import describe_error, load_file, location

Source = tuple[str, str, str | None]  # module, name in it, file; ("builtin", the reward as the config writes it, None)
BUILTIN = "builtin"
GRACE_SECONDS = 5.0  # seconds after its limit after which a process that did not exit is killed
START_SECONDS = 300.0  # seconds for a process to start and import a function's module
STALLED_SECONDS = 60  # seconds without progress after which sending a message fails
SIZE_BYTES = 8  # bytes of a reply's size
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Worker:
    """One process that calls reward functions; a new one replaces one that died or hung."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115
        self._mark = secrets.token_bytes(16)  # begins a reply: a reward may write anything to inherited descriptors
        self._loaded: set[Source] = set()

    def call(self, source: Source, job: bytes, limit: float) -> RewardOutcome:
        """Call a function with pickled arguments, for at most `limit` seconds."""
        if source not in self._loaded or self._process is None:
            loaded = self._request(source, max(START_SECONDS, limit), None)
            if loaded is not None:
                reason = getattr(loaded, "reason", loaded)
                raise UserError(f"a worker process cannot import reward '{source[0]}.{source[1]}': {reason}")
            self._loaded.add(source)
        outcome = self._request(source, limit, job)
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    def kill(self) -> None:
        """Kill the process for good; a pending call returns a failure, and `end` is called afterwards."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                signal_group(self._process.pid, signal.SIGKILL)

    def _request(self, source: Source, limit: float, job: bytes | None) -> Any:
        """Return the worker's reply: None when it has imported a function, an outcome, or a UserError to raise."""
        start = time.perf_counter()
        with self._lock:
            if self._closed:
                return RewardFailure("stuck", "the rewards were closed")
            connection = self._connection or self._start_process()
        try:
            connection.send_bytes(pickle.dumps((source, limit, job)))
            reply = self._read_reply(connection, limit + GRACE_SECONDS)
        except (EOFError, OSError):
            return self._failure(limit, time.perf_counter() - start, hung=False)
        return self._failure(limit, time.perf_counter() - start, hung=True) if reply is None else pickle.loads(reply)

    def _read_reply(self, connection: Connection, limit: float) -> bytes | None:
        """Return the next reply, or None after `limit` seconds; bytes that are no part of one are passed over."""
        received, head, deadline = bytearray(), len(self._mark) + SIZE_BYTES, time.monotonic() + limit
        while (seconds := deadline - time.monotonic()) > 0 and connection.poll(seconds):
            block = os.read(connection.fileno(), 1 << 20)
            if not block:
                raise EOFError
            received += block
            begin = received.find(self._mark)
            if begin < 0:
                del received[: 1 - len(self._mark)]
                continue
            del received[:begin]
            deadline = time.monotonic() + STALLED_SECONDS
            end = head + int.from_bytes(received[len(self._mark) : head])
            if len(received) >= max(head, end):
                return bytes(received[head:end])
        return None

    def _start_process(self) -> Connection:
        parent_socket, child_socket = socket.socketpair()
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            parent_socket.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", STALLED_SECONDS, 0))
        os.ftruncate(self._trace.fileno(), 0)
        paths = [*sys.path, *([] if os.getcwd() in sys.path else [os.getcwd()])]
        code = (
            f"import sys; sys.path[:] = {paths!r}; from upweight.rewards.workers import serve; "
            f"serve({child_socket.fileno()}, {self._trace.fileno()}, {self.seed}, {self._mark})"
        )
        # Prints go to stderr because stdout is for results. In a new session, Ctrl-C reaches only the main process,
        # and child processes that rewards leave running can be killed with the worker.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env={**os.environ, **ONE_THREAD},
            pass_fds=(child_socket.fileno(), self._trace.fileno()),
            start_new_session=True,
        )
        child_socket.close()
        self._connection = Connection(parent_socket.detach())
        self._loaded.clear()
        return self._connection

    def _failure(self, limit: float, seconds: float, *, hung: bool) -> RewardFailure:
        """Kill the process and return the failure with the reason."""
        status = self.end(wait=0.0 if hung else 1.0)
        trace = os.pread(self._trace.fileno(), 1 << 16, 0).decode(errors="replace")
        where = location(_stack_frames(trace))
        if hung or trace.startswith("Timeout"):
            return RewardFailure("timed out", f"it took longer than {limit:g} seconds{where}", seconds)
        names = {-number: number.name for number in signal.Signals}
        how = f"was killed by {names.get(status, f'signal {-status}')}" if status < 0 else f"ended with status {status}"
        return RewardFailure("died", f"its worker process {how}{where}", seconds)

    def end(self, wait: float = 0.0) -> int:
        """Kill the process and its group after at most `wait` seconds, and return its exit status."""
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
            if process is None or connection is None:
                return 0
            deadline = time.monotonic() + wait
            # Not reaped before its group is killed: until then no other process can have its pid.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while time.monotonic() < deadline and os.waitid(os.P_PID, process.pid, flags) is None:
                time.sleep(0.01)
            signal_group(process.pid, signal.SIGKILL)
            connection.close()
            return process.wait()


def _stack_frames(trace: str) -> list[tuple[str, int]]:
    """Return the frames of the thread that answers requests, outermost first, from a faulthandler trace."""
    for thread in trace.split("\n\n"):
        frames = FRAME.findall(thread)
        if any(name == "serve" for _, _, name in frames):
            return [(file, int(line)) for file, line, _ in reversed(frames)]
    return []


Task = Callable[[Worker], Any]


class WorkerPool:
    """Threads that run tasks in submission order, each with one worker process."""

    def __init__(self, count: int) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self.workers = [Worker(1000 * rank + number) for number in range(count)]
        self._owner_pid = os.getpid()
        self._queue: queue.SimpleQueue[tuple[Task, Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [Thread(target=_run, args=(self._queue, worker), daemon=True) for worker in self.workers]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Task) -> "Future[Any]":
        """Run a task when a thread is free."""
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future

    def close(self) -> None:
        """Stop the threads and their processes; pending tasks are cancelled."""
        if os.getpid() != self._owner_pid:
            return  # a fork of the main process has neither threads nor workers
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                item[1].cancel()
        for worker in self.workers:
            self._queue.put(None)
            worker.kill()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GRACE_SECONDS)


def _run(work: "queue.SimpleQueue[tuple[Task, Future[Any]] | None]", worker: Worker) -> None:
    while (item := work.get()) is not None:
        task, future = item
        settle(future, task, worker)
        del item, task, future  # else an idle thread would keep the arguments of its last task alive
    worker.end()


def serve(channel: int, trace: int, seed: int, mark: bytes) -> None:
    """Be a worker: answer requests from `channel`; the stack of a hang or a crash is written to `trace`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (channel, trace):
        os.set_inheritable(descriptor, False)
    pid, connection = os.getpid(), Connection(channel)
    # A child process that a reward leaves running must not keep the channel open.
    os.register_at_fork(after_in_child=connection.close)
    faulthandler.enable(file=trace)
    end_with_parent()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    functions: dict[Source, Function] = {}
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            end_this_group()
        reply = _answer_request(request, functions, trace, seed)
        if os.getpid() != pid:
            os._exit(0)  # a child that a reward forked and let return; the parent answers
        content = pickle.dumps(reply)
        with open(channel, "wb", closefd=False) as answers:
            answers.write(mark + len(content).to_bytes(SIZE_BYTES) + content)


def _answer_request(request: bytes, functions: dict[Source, Function], trace: int, seed: int) -> Any:
    """Return the reply to a request, see `Worker._request`."""
    pid = os.getpid()
    source, limit, job = pickle.loads(request)
    os.ftruncate(trace, 0)
    os.lseek(trace, 0, os.SEEK_SET)
    # Ends the process from a thread that does not need the GIL, so also if C code hangs.
    faulthandler.dump_traceback_later(limit, exit=True, file=trace)
    try:
        if job is None:
            functions[source] = _import_reward(source)
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
            return None
        arguments, logs, name, count = pickle.loads(job)
        outcome = invoke(functions[source], arguments, logs, name, count)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return outcome
    except Exception as error:  # importing runs foreign code; an alarm that the reward set may fire late
        if job is None or isinstance(error, UserError):
            return UserError(describe_error(error) if job is None else str(error))
        return failed(error, 0.0)
    finally:
        if os.getpid() == pid:  # a forked child has no such thread and would wait for it forever
            faulthandler.cancel_dump_traceback_later()


def _import_reward(source: Source) -> Any:
    module, name, file = source
    if module == BUILTIN:
        from upweight.rewards.builtin import builtin_reward

        return builtin_reward(name)
    return operator.attrgetter(name)(load_file(module, Path(file)) if file else importlib.import_module(module))
