"""What is written is there in full or not at all."""

import os
import resource
import subprocess

import pytest

from upweight.files import atomic_path, remove_partials, storage_error, write_text


def test_a_text_takes_the_place_of_the_one_before(tmp_path):
    for text in ("one", "two \u00e9"):
        write_text(tmp_path / "file", text)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "two \u00e9"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_fails_half_way_leaves_nothing_new(tmp_path, kind):
    def fail() -> None:
        with atomic_path(tmp_path / "it") as part:
            (part.mkdir if kind == "folder" else part.touch)()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_process_of_this_number_left_is_no_hindrance(tmp_path):
    (tmp_path / f".it.{os.getpid()}.partial" / "left").mkdir(parents=True)
    with atomic_path(tmp_path / "it") as part:
        part.mkdir()
    assert not list((tmp_path / "it").iterdir())


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f".it.json.{gone.pid}.partial").touch()
    (tmp_path / f".it.{gone.pid}.partial" / "inner").mkdir(parents=True)
    others = {f".it.json.{os.getpid()}.partial", "it.json", ".other.partial", f"it.{gone.pid}.partial"}
    for name in others:
        (tmp_path / name).touch()
    remove_partials(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_a_write_that_the_system_refuses_names_its_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as raised:
            write_text(tmp_path / "page.html", "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path / "page.html") in (storage_error(raised.value) or "")
    assert not list(tmp_path.iterdir())
