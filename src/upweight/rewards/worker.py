"""The process that calls reward functions, one at a time, in its main thread. Imports nothing heavy."""

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

from upweight.processes import end_this_group, end_with_parent
from upweight.rewards.answers import Broken, Outcome, failed, invoke
from upweight.user_modules import described, load_file

Source = tuple[str, str, str | None]  # module, name in it, file; ("builtin", what the config says, None)
BUILTIN = "builtin"


def serve(channel: int, trace: int, seed: int) -> None:
    """Answer requests that come through `channel`; where the process is when it hangs or crashes goes to `trace`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    me, connection = os.getpid(), Connection(channel)
    # A child that a reward leaves behind must not keep the channel open.
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
        if os.getpid() != me:
            os._exit(0)  # a child that a reward forked and let return: the parent answers
        connection.send_bytes(pickle.dumps(reply))


def _answer(request: bytes, functions: dict[Source, Callable[..., Any]], trace: int, seed: int) -> Outcome | None:
    me = os.getpid()
    source, limit, job = pickle.loads(request)
    os.ftruncate(trace, 0)
    os.lseek(trace, 0, os.SEEK_SET)
    # Ends the process from a thread that does not need the interpreter: also where C code hangs.
    faulthandler.dump_traceback_later(limit, exit=True, file=trace)
    try:
        if job is None:
            functions[source] = find(source)
            _seed(seed)
            return None
        arguments, logs, name, count = pickle.loads(job)
        outcome = invoke(functions[source], arguments, logs, name, count)
        _clear_alarm()
        return outcome
    except Exception as error:  # importing runs foreign code; a reward's own alarm may ring late
        if job is None:
            return Broken(described(error))
        return failed(error, 0.0)
    finally:
        if os.getpid() == me:  # a forked child has no such thread, and would wait for it for ever
            faulthandler.cancel_dump_traceback_later()


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _clear_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def find(source: Source) -> Callable[..., Any]:
    """The reward function at a place, as the main process found it there."""
    module, name, file = source
    if module == BUILTIN:
        from upweight.rewards.builtin import builtin_reward

        reward = builtin_reward(name)
        assert reward is not None
        return reward
    return operator.attrgetter(name)(load_file(module, Path(file)) if file else importlib.import_module(module))
