"""A user's file as a module; imports nothing heavy, since the processes of rewards do it too."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def load_file(name: str, file: Path) -> ModuleType:
    """The module in a file: under its own name unless that is taken, then under another."""
    parts = len(name.split(".")) + (file.name == "__init__.py")
    with _importable(file.parents[parts - 1]):
        loaded = sys.modules.get(name)
        if loaded is not None and file_of(loaded) == file:
            return loaded
        if loaded is None:
            module = importlib.import_module(name)
            if file_of(module) == file:
                return module
        # The name is taken by a module that others use: the user's file gets a name of its own.
        spec = importlib.util.spec_from_file_location(f"upweight_user.{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def file_of(module: ModuleType) -> Path | None:
    """Where a module was read from, if it was."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


@contextmanager
def _importable(root: Path) -> Iterator[None]:
    """The folder first on the path while importing, and last from then on, for imports inside functions."""
    place = str(root)
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)
