"""The worker process that calls reward functions in its main thread; it imports nothing heavy."""

import faulthandler
import importlib
import operator
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from upweight.errors import UserError
from upweight.processes import end_this_group, end_with_parent
from upweight.rewards.answers import RewardOutcome, failed, invoke
from upweight.user_modules import describe_error, load_file

Source = tuple[str, str, str | None]  # module, name in it, file; ("builtin", the reward as the config writes it, None)
BUILTIN = "builtin"


def serve(channel: int, trace: int, seed: int) -> None:
    """Answer requests from `channel`; the stack of a hang or a crash is written to `trace`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pid, connection = os.getpid(), Connection(channel)
    # A child process that a reward leaves running must not keep the channel open.
    os.register_at_fork(after_in_child=connection.close)
    faulthandler.enable(file=trace)
    end_with_parent()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    functions: dict[Source, Callable[..., Any]] = {}
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            end_this_group()
        reply = _answer(request, functions, trace, seed)
        if os.getpid() != pid:
            os._exit(0)  # a child that a reward forked and let return; the parent answers
        connection.send_bytes(pickle.dumps(reply))


def _answer(
    request: bytes, functions: dict[Source, Callable[..., Any]], trace: int, seed: int
) -> RewardOutcome | UserError | None:
    pid = os.getpid()
    source, limit, job = pickle.loads(request)
    os.ftruncate(trace, 0)
    os.lseek(trace, 0, os.SEEK_SET)
    # Ends the process from a thread that does not need the GIL, so also if C code hangs.
    faulthandler.dump_traceback_later(limit, exit=True, file=trace)
    try:
        if job is None:
            functions[source] = import_reward(source)
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


def import_reward(source: Source) -> Callable[..., Any]:
    """Import the reward function at `source`, as the main process did."""
    module, name, file = source
    if module == BUILTIN:
        from upweight.rewards.builtin import builtin_reward

        reward = builtin_reward(name)
        assert reward is not None
        return reward
    return operator.attrgetter(name)(load_file(module, Path(file)) if file else importlib.import_module(module))
