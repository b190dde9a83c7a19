"""A disk that fills up, becomes read-only or vanishes ends a run in one line, and the last whole checkpoint stays."""

import errno
import json
import re
import resource
import shutil
import subprocess

import pytest
from transformers import TrainerCallback

from made_runs import write_config
from upweight.config import load_config
from upweight.errors import UserError
from upweight.files import SIZE_LIMIT, storage_error
from upweight.runs.checkpoints import checkpoints_of, is_whole
from upweight.runs.record import recorded
from upweight.train.run import train


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


class AtStep(TrainerCallback):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def trained(folder, model, out, act=lambda: None):
    file = write_config(folder, model, max_steps=40, save_steps=2, save_total_limit=20, output_dir=str(out))
    train(load_config(file), watchers=[AtStep(5, act)])


def test_a_full_disk_is_one_line_and_the_last_whole_checkpoint_stays(small_disk, model_folder, tmp_path):
    full = pytest.raises(UserError, match=r"No space left on device.* free\. .*go on from step \d+ with")
    with full as caught:
        trained(tmp_path, model_folder, small_disk / "out")
    step = next(step for step, folder in checkpoints_of(small_disk / "out") if is_whole(folder))
    assert f"go on from step {step} with" in str(caught.value)


def test_a_disk_that_becomes_read_only_is_named(small_disk, model_folder, tmp_path, caplog):
    def make_read_only():  # by a mount above it: files are open for writing below
        subprocess.run(["mount", "--bind", small_disk, small_disk], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", small_disk], check=True)

    try:
        with pytest.raises(UserError, match=r"Read-only file system.*go on from step 4 with"):
            trained(tmp_path, model_folder, small_disk / "out", make_read_only)
        assert "run.json could not be written: Read-only file system" in caplog.text
    finally:
        subprocess.run(["umount", "-l", small_disk], check=True)


def test_a_folder_that_vanishes_is_named(model_folder, tmp_path):
    with pytest.raises(UserError, match=r"out is gone\. .*start again: there is no whole checkpoint"):
        trained(tmp_path, model_folder, tmp_path / "out", lambda: shutil.rmtree(tmp_path / "out"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EIO, "Input/output error", "x.pt"), "cannot be written to: Input/output error"),
        (OSError(errno.ESTALE, "Stale file handle"), "cannot be written to: Stale file handle"),
        (
            RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3: file write failed"),
            "No space left",
        ),
        (RuntimeError("CUDA error: GPU is lost"), "the GPU was lost: CUDA error: GPU is lost."),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "dataloader_num_workers: a process that reads rows was lost: DataLoader worker .* by signal: Killed.",
        ),
    ],
)
def test_network_folders_and_gpus_that_are_lost_are_named(error, says, tmp_path):
    with pytest.raises(UserError, match=says), recorded(tmp_path, {}, writes=True):
        raise error
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["state"] == "failed"
    assert re.search(says, record["message"])


@pytest.mark.parametrize("limited", [False, True])
def test_a_limit_on_file_sizes_is_no_full_disk(limited, monkeypatch):
    at = 1 << 20 if limited else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (at, resource.RLIM_INFINITY))
    of_torch = storage_error(RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed"))
    assert of_torch == (SIZE_LIMIT if limited else "No space left on device")
    assert storage_error(OSError(errno.EFBIG, "File too large", "x.pt")) == f"{SIZE_LIMIT} (x.pt)"
    assert storage_error(RuntimeError("I/O error: File too large (os error 27)")) == SIZE_LIMIT


def test_other_errors_keep_their_traceback(tmp_path):
    with pytest.raises(ValueError, match="odd"), recorded(tmp_path, {}, writes=True):
        raise ValueError("odd")
    assert storage_error(ValueError("odd")) is None
    assert storage_error(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
