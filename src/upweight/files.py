"""Atomic writes of files and folders, and errors of the disk."""

import contextlib
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upweight.processes import is_alive

STORAGE_ERRORS: dict[int, tuple[str, ...]] = {  # with texts that stand for them
    errno.ENOSPC: ("PytorchStreamWriter failed writing file", "unexpected pos", "iostream error"),
    **dict.fromkeys((errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EHOSTDOWN), ()),
}
SIZE_LIMIT = "the limit on the sizes of files was met; `ulimit -f unlimited`, typed before the command, lifts it"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write a file or folder to, and rename it to `path` afterwards."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _remove(partial)  # an earlier process with this id may have left one
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        # A full disk is met by a file that is open, which has no name then.
        if error.errno in STORAGE_ERRORS and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise
    finally:
        _remove(partial)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, flushed to disk before it is renamed."""
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove_partials(folder: Path) -> None:
    """Delete what killed processes left in a folder of files that they were writing."""
    for partial in folder.glob(".*.partial"):
        process = partial.suffixes[-2].removeprefix(".") if len(partial.suffixes) > 1 else ""
        if process.isdecimal() and not is_alive(int(process)):
            _remove(partial)


def storage_error(error: BaseException | None) -> str | None:
    """Return what the disk or file system reported where that caused an error, else None."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
            return f"{_named(error.errno)}{f' ({error.filename})' if error.filename else ''}"
        # Libraries that write without Python raise other errors.
        for number, signs in STORAGE_ERRORS.items():
            if os.strerror(number) in str(error):
                return _named(number)
            if any(sign in str(error) for sign in signs):  # which do not tell a full disk from a file that is too large
                is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
                return _named(errno.EFBIG if is_limited else number)
        error = error.__cause__ or error.__context__
    return None


def _named(number: int) -> str:
    return SIZE_LIMIT if number == errno.EFBIG else os.strerror(number)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def packaged_yaml(file: Path) -> Any:
    """Return the content of a YAML file of this package."""
    import yaml  # reward workers import this module and read no YAML

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the parser in C, where it was built: ten times as fast
    return yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
