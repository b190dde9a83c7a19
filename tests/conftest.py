from collections.abc import Iterator

import pytest
from hypothesis import settings

from upweight.log import logger

# A busy machine must not fail a property, and every run tries the same examples.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A test that runs a command sets the log up; the next one finds it as it was."""
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = before
