"""Files of text as bytes: compressed ones are opened, those that are not UTF-8 explained with a way out."""

import bz2
import gzip
import io
import lzma
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from upweight.errors import UserError

EXCEL = "save it in Excel by File, Save as, 'CSV UTF-8'"
WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")
UTF16 = (b"\xff\xfe", b"\xfe\xff")
AROUND = 20  # characters shown on each side of a byte


def _open_zst(path: Path, mode: str = "rb", encoding: str | None = None, newline: str | None = None) -> Any:
    import pyarrow as pa  # heavy, and commands that read a config alone come here

    content = io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return io.TextIOWrapper(content, encoding, newline=newline) if "t" in mode else content


COMPRESSED: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst,
}  # fmt: skip


@contextmanager
def explained_encoding(file: Path) -> Iterator[None]:
    """Turn a failure to decode a file into a UserError with the line, the byte and the way out."""
    try:
        yield
    except Exception as error:  # readers of tables wrap it in errors of their own
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UnicodeDecodeError):
            cause = cause.__cause__
        if cause is None or (problem := encoding_problem(file)) is None:
            raise
        raise UserError(problem) from cause


def workbook_problem(file: Path) -> str | None:
    """Return why a file of a spreadsheet program is not read, and what to do; None for other files."""
    is_workbook = file.suffix.lower() in WORKBOOKS
    return f"{file}: is a workbook, which is not read: {EXCEL}" if is_workbook else None


def encoding_problem(file: Path, most: int | None = None) -> str | None:
    """Return what keeps a file from being read as UTF-8, and what to do; None where its (first) lines can be read."""
    bad: tuple[int, bytes, int] | None = None  # number of a line, the line, the place of the byte in it
    utf8 = 0  # lines that can be read and are not ASCII
    with COMPRESSED.get(file.suffix.lower(), open)(file, "rb") as opened:
        for number, line in enumerate(islice(opened, most), 1):
            if number == 1 and line.startswith(UTF16):
                return f"{file}: is UTF-16: {_remedy(file, 'utf-16')}."
            try:
                utf8 += not line.removeprefix(b"\xef\xbb\xbf").isascii() and bool(line.decode())
            except UnicodeDecodeError as error:
                bad = bad or (number, line, error.start)
    if bad is None:
        return None
    number, line, place = bad
    problem = f"{file}:{number}: is not UTF-8 text: byte 0x{line[place]:02x} at place {place + 1} of the line"
    if utf8:
        return f"{problem}, and other lines are UTF-8. Mend that line"
    try:
        around = line.decode("cp1252")[max(place - AROUND, 0) : place + AROUND].strip()
    except UnicodeDecodeError:  # some bytes mean nothing there
        return f"{problem}: {_remedy(file, 'ENCODING')}, with the encoding that it was written in."
    seen = f"In cp1252, which Excel on Windows writes, it reads {around!r}"
    return f"{problem}. {seen}. If that is right: {_remedy(file, 'cp1252')}; if not, with another encoding."


def _remedy(file: Path, encoding: str) -> str:
    """Return the command that converts a file to UTF-8, and what does the same in a spreadsheet."""
    if file.suffix.lower() in COMPRESSED:
        return f"unpack it, then `iconv -f {encoding} -t utf-8 FILE > NEW_FILE`"
    name, target = shlex.quote(str(file)), shlex.quote(f"{file.stem}-utf8{file.suffix}")
    excel = f"{EXCEL}, or " if file.suffix.lower() in (".csv", ".tsv") else ""
    return f"{excel}`iconv -f {encoding} -t utf-8 {name} > {target}`"
