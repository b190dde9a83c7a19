"""Atomic writes of files and folders."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write a file or folder to, and rename it to `path` afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _remove(partial)  # an earlier process with this id may have left one
    try:
        yield partial
        partial.replace(path)
    finally:
        _remove(partial)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, flushed to disk before it is renamed."""
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
