"""Random access to the rows of JSON lines, JSON lists and plain text files, which are parsed on demand."""

import json
import lzma
import mmap
import os
import re
import shutil
import tempfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upweight.data.sources.raw_files import COMPRESSED, encoding_problem
from upweight.errors import UserError

READ_BYTES = 1 << 26
LIST = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[")
SPACES = np.frombuffer(b" \t\r\f\v", np.uint8)


class LineFile:
    """The rows of one file of JSON or text; blank lines are skipped."""

    def __init__(self, path: Path, kind: Literal["json", "text"]) -> None:
        self.path = path
        self.kind: Literal["json", "text"] = kind

    def identity(self) -> list[Any]:
        """Return what identifies this content in the cache key: path, size, modification time."""
        stat = self.path.stat()
        return [str(self.path.resolve()), stat.st_size, stat.st_mtime_ns]

    def __len__(self) -> int:
        return len(self._row_spans)

    def take(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        return [self._parse_row(int(index)) for index in indices]

    def location(self, index: int) -> str:
        """Return the number of a row, counted from 0, and its line, counted from 1."""
        return f"row {index} ({self.path.name}:{self._row_spans[index, 2]})"

    @cached_property
    def _read_bytes(self) -> mmap.mmap | bytes:
        opener = COMPRESSED.get(self.path.suffix.lower())
        try:
            with tempfile.TemporaryFile() if opener else self.path.open("rb") as file:
                if opener:
                    with opener(self.path, "rb") as packed:
                        shutil.copyfileobj(packed, file, READ_BYTES)
                file.seek(0, os.SEEK_END)
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else b""
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise UserError(f"{self.path}: cannot be read ({error}).") from error

    @cached_property
    def _row_spans(self) -> NDArray[np.int64]:
        """Return the first byte, the byte after the last, and the line number (from 1) of each row."""
        if self.kind == "text":
            return _line_spans(self._read_bytes)
        if LIST.match(self._read_bytes):
            return self._list_spans()
        spans = _line_spans(self._read_bytes)
        if len(spans) <= 1 or not _opens_object(self._decode_span(spans[0, 0], spans[0, 1], 1).rstrip()):
            return spans
        with _explain_errors(self.path, 1):
            json.loads(self._decode_span(0, len(self._read_bytes), 1))
        return np.array([[0, len(self._read_bytes), spans[0, 2]]])

    def _list_spans(self) -> NDArray[np.int64]:
        """Return the spans of the rows of a file that is one JSON list."""
        text, decoder, spans = self._decode_span(0, len(self._read_bytes), 1), json.JSONDecoder(), []
        mark = BOM_UTF8 if self._read_bytes[: len(BOM_UTF8)] == BOM_UTF8 else b""
        position, seen, seen_bytes, line = text.index("[") + 1, 0, len(mark), 1
        with _explain_errors(self.path, 1):
            while (position := _skip_space(text, position)) < len(text) and text[position] != "]":
                _, end = decoder.raw_decode(text, position)
                line += text.count("\n", seen, position)
                first = seen_bytes + len(text[seen:position].encode())
                last = first + len(text[position:end].encode())
                spans.append((first, last, line))
                line += text.count("\n", position, end)
                seen, seen_bytes, position = end, last, _skip_space(text, end)
                if text[position : position + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
                position += text[position] == ","
            if text[position:].strip() != "]":
                raise json.JSONDecodeError("Expecting the end of the list", text, position)
        return np.array(spans, np.int64).reshape(-1, 3)

    def _decode_span(self, first: int, last: int, line: int) -> str:
        return _decoded(self.path, self._read_bytes[first:last], line)

    def _parse_row(self, index: int) -> dict[str, Any]:
        first, last, line = (int(value) for value in self._row_spans[index])
        return parse_line(self.path, self._read_bytes[first:last], line, self.kind)


def parse_line(path: Path, raw: bytes, line: int, kind: Literal["json", "text"]) -> dict[str, Any]:
    """Return the row that the bytes of a JSON object or a line of text hold; they begin on `line` of the file."""
    text = _decoded(path, raw, line)
    if kind == "text":
        return {"text": text.rstrip("\r\n")}
    with _explain_errors(path, line):
        row = json.loads(text)
    if not isinstance(row, dict):
        raise UserError(f"{path}:{line}: expected an object {{...}}, got {text[:40]!r}.")
    return row


def _decoded(path: Path, raw: bytes, line: int) -> str:
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        problem = encoding_problem(path) if path.is_file() else None
        raise UserError(problem or f"{path}:{line}: is not UTF-8 text. Save it as UTF-8.") from error


@contextmanager
def _explain_errors(path: Path, line: int) -> Iterator[None]:
    """Turn JSON errors into errors about a file; the text that is decoded begins on `line`."""
    try:
        yield
    except json.JSONDecodeError as error:
        where = f"{path}:{line + error.lineno - 1}"
        rest = error.doc[error.pos :].partition("\n")[0].lstrip()
        if rest.startswith(("//", "#", "/*")):
            raise UserError(f"{where}: a comment ({rest[:30]!r}) is not JSON. Remove it.") from error
        remedy = "Write one object on each line, or one list of objects."
        problem = error.msg.removesuffix(" at")  # of "Unterminated string starting at"
        raise UserError(f"{where}: not JSON: {problem} at column {error.colno}. {remedy}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{path}:{line}: cannot be read as JSON: {error}.") from error


def _opens_object(text: str) -> bool:
    """Return whether a line only begins an object that later lines continue."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.startswith("{") and error.pos >= len(text)
    except RecursionError:
        return False  # parsing the row raises the error
    return False


def _line_spans(content: mmap.mmap | bytes) -> NDArray[np.int64]:
    """Return the first byte, the byte after the last, and the number of each line that is not blank."""
    size = len(content)
    blocks = (
        (start, np.frombuffer(content[start : start + READ_BYTES], np.uint8)) for start in range(0, size, READ_BYTES)
    )
    ends = [np.flatnonzero(block == ord("\n")) + start for start, block in blocks]
    last = np.append(np.concatenate(ends) if ends else np.zeros(0, np.int64), size)
    first = np.append(0, last[:-1] + 1)
    filled = last > first
    # Only a line that begins with white space can be blank without being empty.
    begins = np.frombuffer(content, np.uint8)[first[filled]]
    for number in np.flatnonzero(filled)[np.isin(begins, SPACES)]:
        filled[number] = bool(content[first[number] : last[number]].strip())
    return np.stack([first, last, np.arange(1, len(first) + 1)], 1)[filled].astype(np.int64)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
