"""Files and folders that are there in full or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` for a file or folder to be written under, which then takes that place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _remove(partial)  # a process of this number may have left one
    try:
        yield partial
        partial.replace(path)
    finally:
        _remove(partial)


def write_text(path: Path, text: str) -> None:
    """Write a file that has reached the disk before it takes its place."""
    with written_whole(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
