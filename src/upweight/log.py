"""The package's logger: plain lines on stderr, and each notice once."""

import logging
import sys
from typing import ClassVar, TextIO

logger = logging.getLogger("upweight")
_said: set[str] = set()


def set_up_logging() -> None:
    """Send the package's log to stderr as plain lines; stdout is for results only."""
    handler = _AfterStatus(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def quiet_transformers() -> None:
    """Keep warnings and bars of transformers away from what a command prints."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def is_seen() -> bool:
    """Whether somebody watches: stderr is a terminal, and more than warnings is wanted."""
    return sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)


class _AfterStatus(logging.StreamHandler[TextIO]):
    """Writes lines where a passing one stands."""

    passing: ClassVar[bool] = False  # whether one stands there: all handlers share a terminal

    def emit(self, record: logging.LogRecord) -> None:
        clear_status()
        super().emit(record)


def show_status(text: str) -> None:
    """Show a passing line on stderr, a terminal: whatever is written next takes its place."""
    clear_status()
    sys.stderr.write(text)
    sys.stderr.flush()
    _AfterStatus.passing = True


def clear_status() -> None:
    """Take a passing line away, for what does not go through the logger."""
    if _AfterStatus.passing:
        _AfterStatus.passing = False
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()


def warn_once(message: str) -> None:
    """Log a warning the first time it is met in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning("warning: %s", message)
