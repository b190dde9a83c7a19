"""What the files of a run say about its process."""

import os
import shutil
import subprocess
import sys

import pytest

from upweight.runs.files import begun_at, is_alive


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere such a process cannot be told from a running one")
def test_a_process_that_has_ended_is_not_alive_though_its_parent_has_not_asked():
    assert is_alive(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a number is all there is")
def test_another_process_with_the_number_of_one_that_is_gone_is_told_from_it():
    begun = begun_at(os.getpid())
    assert begun is not None
    assert is_alive(os.getpid(), begun)
    assert not is_alive(os.getpid(), str(int(begun) - 1))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file says when a process began")
def test_a_process_whose_name_is_cut_inside_a_character_has_begun(tmp_path):
    sleeper = tmp_path / ("\u00e9" * 8)  # of its 16 bytes the system keeps 15
    shutil.copy(shutil.which("sleep") or "", sleeper)
    with subprocess.Popen([sleeper, "5"]) as child:
        begun = begun_at(child.pid)
        assert begun is not None
        assert is_alive(child.pid, begun)
        child.kill()


def test_a_live_process_of_which_nothing_can_be_read_is_alive(monkeypatch):
    monkeypatch.setattr("upweight.runs.files._standing", lambda _: (None, None))
    assert is_alive(os.getpid(), "55")
