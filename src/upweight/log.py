"""The package's logger: plain lines on stderr, a status line, and warnings that appear once."""

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import ClassVar, TextIO

logger = logging.getLogger("upweight")
_warned: set[str] = set()
WORD = re.compile(r"\s+|`[^`]*`\S*|\S+")  # a command in backticks counts as one, so that it can be copied


def set_up_logging() -> None:
    """Send the package's log to stderr as plain lines; stdout is for results only."""
    if not sys.stderr.isatty():  # some libraries draw bars into files and pipes, and none of their own options stops it
        os.environ.setdefault("TQDM_DISABLE", "1")
    handler = _ClearingHandler(sys.stderr)
    handler.setFormatter(_FittingFormatter("%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def quiet_transformers(*, progress_bars: bool = False) -> None:
    """Turn off the warnings of transformers, and its progress bars unless they are wanted."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not progress_bars:
        transformers_logging.disable_progress_bar()


def shows_status() -> bool:
    """Whether a status line is shown: stderr is a terminal, and the level includes INFO."""
    return sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)


class _FittingFormatter(logging.Formatter):
    """A formatter that breaks long lines where a person reads them."""

    def format(self, record: logging.LogRecord) -> str:
        return fitted(super().format(record))


def fitted(text: str, width: int | None = None) -> str:
    """Return a text for stderr: on a terminal (or for a `width`), long lines are broken between words."""
    if width is None and not sys.stderr.isatty():
        return text
    width = width or shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


def in_parts(parts: Iterable[str], width: int | None = None) -> str:
    """Join parts of a line for stderr; on a terminal (or for a `width`) none of them is broken in two."""
    if width is None and not sys.stderr.isatty():
        return "  ".join(parts)
    width = width or shutil.get_terminal_size().columns
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}  {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) < width or not lines[-1] else [*lines, f"  {part}"]
    return "\n".join(lines)


def _broken(line: str, width: int) -> Iterator[str]:
    """Yield the lines of a long one, which begin below the second column where it is a row of a table."""
    column = re.match(r"\s*\S+ {2,}", line)
    lead = re.match(r"\s*", line)
    indent = " " * (column.end() if column and column.end() < width // 2 else len(lead[0]) + 2 if lead else 2)
    shown = ""
    for word in WORD.findall(line):
        if len(shown + word.rstrip()) >= width and shown.strip():
            yield shown.rstrip()
            shown = indent + word.lstrip()
        else:
            shown += word
    yield shown


class _ClearingHandler(logging.StreamHandler[TextIO]):
    """A handler that clears the status line before it writes."""

    shown: ClassVar[bool] = False  # whether there is a status line; all handlers share one terminal

    def emit(self, record: logging.LogRecord) -> None:
        clear_status()
        super().emit(record)


def counted(number: int, what: str) -> str:
    """Return a number with what it counts: `1 row`, `2,000 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def show_status(text: str) -> None:
    """Show a status line on stderr, which the next output replaces."""
    clear_status()
    sys.stderr.write(text)
    sys.stderr.flush()
    _ClearingHandler.shown = True


def clear_status() -> None:
    """Clear the status line, before output that does not go through the logger."""
    if _ClearingHandler.shown:
        _ClearingHandler.shown = False
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def inform_once(message: str) -> None:
    """Log a line the first time that it occurs in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.info("%s", message)


def warn_once(message: str) -> None:
    """Log a warning the first time that it occurs in this process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning("warning: %s", message)
