import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the hub's library is imported, which reads it once

from upweight.config.config import blocks, method_keys
from upweight.log import logger
from upweight.methods import METHODS

# A busy machine must not fail a property, and every run tries the same examples.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first, then the largest, so that the workers of a run end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    counts = Counter(item.path for item in items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: (item.path not in slow, -counts[item.path]))


def pytest_collection_finish() -> None:
    """Every training collects garbage; what is imported by now stays, and need not be looked through each time."""
    gc.freeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model, which nobody writes to."""
    from made_runs import write_model  # which imports all that trains

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A test that runs a command sets the log up; the next one finds it as it was."""
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = before


@pytest.fixture(autouse=True)
def methods_as_they_were() -> Iterator[None]:
    """A config may register a method of its user; the next test knows only those that it would know alone."""
    before = dict(METHODS)
    yield
    if before != METHODS:
        METHODS.clear()
        METHODS.update(before)
        method_keys.cache_clear()
        blocks.cache_clear()
