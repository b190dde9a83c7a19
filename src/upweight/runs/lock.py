"""One process at a time writes to a run folder."""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from upweight.errors import UserError
from upweight.log import logger
from upweight.runs.files import this_machine, unwritable_reason

LOCK = ".lock"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a run folder, which is created if missing; raise a UserError where another process holds it."""
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _lock_file(path)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            why = unwritable_reason(folder) or f"{folder} cannot be written to: {error.strerror}"
            raise UserError(f"output_dir: {why}. Name another folder.") from error
        logger.warning("warning: %s has no locks; two runs into it would not notice each other", folder)
        yield
        return
    try:
        os.ftruncate(file, 0)
        os.write(file, json.dumps({"pid": os.getpid(), "machine": this_machine()}).encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone or read-only by now
            path.unlink()
        os.close(file)


def _lock_file(path: Path) -> int:
    """Return the descriptor of the locked file at `path`; the lock ends with the process, and no child inherits it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
            os.close(file)  # the process that held it has just deleted it
        except OSError as error:
            os.close(file)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            remedy = "Wait for it, end it, or name another folder."
            raise UserError(f"output_dir: {_describe_holder(path)} is training into {path.parent}. {remedy}") from None


def _describe_holder(path: Path) -> str:
    """Describe the process that holds the lock."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        here = holder["machine"] == this_machine()
        return f"process {holder['pid']}" if here else f"process {holder['pid']} of another machine"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"
