"""The package's logger: plain lines on stderr, and each notice once."""

import logging
import sys

logger = logging.getLogger("upweight")
_said: set[str] = set()


def set_up_logging(level: int = logging.INFO) -> None:
    """Send the package's log to stderr as plain lines; stdout is for results only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s" if level < logging.INFO else "%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def warn_once(message: str) -> None:
    """Log a warning the first time it is met in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning("warning: %s", message)
