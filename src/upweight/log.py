"""The package's logger: plain lines on stderr, a status line, and warnings that appear once."""

import logging
import os
import sys
from typing import ClassVar, TextIO

logger = logging.getLogger("upweight")
_warned: set[str] = set()


def set_up_logging() -> None:
    """Send the package's log to stderr as plain lines; stdout is for results only."""
    if not sys.stderr.isatty():  # some libraries draw bars into files and pipes, and none of their own options stops it
        os.environ.setdefault("TQDM_DISABLE", "1")
    handler = _ClearingHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
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


class _ClearingHandler(logging.StreamHandler[TextIO]):
    """A handler that clears the status line before it writes."""

    shown: ClassVar[bool] = False  # whether there is a status line; all handlers share one terminal

    def emit(self, record: logging.LogRecord) -> None:
        clear_status()
        super().emit(record)


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
