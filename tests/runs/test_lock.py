"""A run folder has one writer."""

import subprocess
import sys

import pytest

from made_runs import HOLDER
from upweight.errors import UserError
from upweight.runs.lock import lock_folder
from upweight.runs.record import earlier_run


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_that_another_process_holds_is_refused_with_its_number(holder, tmp_path):
    with pytest.raises(UserError, match=rf"process {holder.pid} is training into .*run"), lock_folder(tmp_path / "run"):
        pass


def test_a_killed_process_leaves_the_folder_free(holder, tmp_path):
    holder.kill()
    holder.wait()
    with lock_folder(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").exists()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_child_does_not_keep_the_lock(tmp_path):
    with lock_folder(tmp_path):
        child = subprocess.Popen(["sleep", "60"])
    try:
        command = [sys.executable, "-c", HOLDER.replace("time.sleep(60)", ""), tmp_path]
        again = subprocess.run(command, capture_output=True, text=True, check=True)
        assert again.stdout == "held\n"
    finally:
        child.kill()
        child.wait()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        assert earlier_run(folder) is None  # `train` asks before it takes the lock
        with pytest.raises(UserError, match=r"output_dir: .*/file is a file\. Name"), lock_folder(folder):
            pass
