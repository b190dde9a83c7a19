"""Who is there, who ends with whom, and which port is free."""

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from upweight.processes import (
    forwarded_signals,
    is_alive,
    keep_pages_shared,
    process_ids,
    signal_group,
    start_ticks,
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such a process cannot be told from a running one")
def test_a_process_that_has_ended_is_not_alive_though_its_parent_has_not_asked():
    assert is_alive(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a number is all there is")
def test_another_process_with_the_number_of_one_that_is_gone_is_told_from_it():
    begun = start_ticks(os.getpid())
    assert begun is not None
    assert is_alive(os.getpid(), begun)
    assert not is_alive(os.getpid(), str(int(begun) - 1))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file says when a process began")
def test_a_process_whose_name_is_cut_inside_a_character_has_begun(tmp_path):
    sleeper = tmp_path / ("\u00e9" * 8)  # of its 16 bytes the system keeps 15
    shutil.copy(shutil.which("sleep") or "", sleeper)
    with subprocess.Popen([sleeper, "5"]) as child:
        begun = start_ticks(child.pid)
        assert begun is not None
        assert is_alive(child.pid, begun)
        child.kill()


def test_a_live_process_of_which_nothing_can_be_read_is_alive(monkeypatch):
    monkeypatch.setattr("upweight.processes.stat_of", lambda _: (None, None, None))
    assert is_alive(os.getpid(), "55")


PARENT = """
import subprocess, sys
child = [sys.executable, "-c", sys.argv[1]]
print(subprocess.Popen(child, start_new_session=True).pid, flush=True)
input()
"""
CHILD = """
import subprocess, sys, time
from upweight import processes
processes.PARENT_CHECK_SECONDS = 0.05
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
processes.end_with_parent()
time.sleep(60)
"""


def test_a_process_ends_with_the_one_that_started_it_and_with_its_own_children():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        time.sleep(0.5)
        assert signal_group(group, 0)
        parent.kill()
    deadline = time.monotonic() + 20
    while any_alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any_alive(group)


def any_alive(group: int) -> bool:
    """Whether a group has a process that is more than a name its parent has not asked for."""
    return any(_in_group(number, group) and is_alive(number) for number in process_ids())


def _in_group(number: int, group: int) -> bool:
    try:
        return os.getpgid(number) == group
    except ProcessLookupError:
        return False


def test_a_forked_process_leaves_the_pages_of_its_parent_to_it():
    def count(results):
        keep_pages_shared()
        results.put((gc.get_freeze_count(), gc.collect()))

    context = multiprocessing.get_context("fork")
    results, objects, before = context.Queue(), len(gc.get_objects()), gc.get_freeze_count()
    process = context.Process(target=count, args=(results,))
    process.start()
    frozen, _ = results.get(timeout=30)
    process.join()
    assert frozen >= 0.9 * objects
    assert gc.get_freeze_count() == before  # of the parent


def test_a_signal_is_passed_on_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        with forwarded_signals([signal.SIGTERM], [child]) as came:
            os.kill(os.getpid(), signal.SIGTERM)
            assert child.wait(20) == -signal.SIGTERM
        assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
