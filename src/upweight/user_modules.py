"""A user's file as a module, and errors out of it; imports nothing heavy, since the processes of rewards do it too."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

INSTALLED = ("site-packages", "dist-packages")
OURS, STANDARD_LIBRARY = str(Path(__file__).parent), str(Path(os.__file__).parent)


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


def described(error: BaseException) -> str:
    """An error as people quote it, with its line in the user's code."""
    text = str(error).strip()
    shown = (text[:297] + "...") if len(text) > 300 else text
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}{': ' if shown else ''}{shown}{place(frames)}"


def place(frames: list[tuple[str, int]]) -> str:
    """The innermost frame of the user's code, as ` (file, line n)`; frames run from the outermost inwards."""
    known = [at for at in frames if not at[0].startswith(("<", OURS))]
    known = [at for at in known if is_installed(at[0]) or not at[0].startswith(STANDARD_LIBRARY)]
    users = [at for at in known if not is_installed(at[0])]
    file, line = (users or known or [("", 0)])[-1]
    return f" ({Path(file).name}, line {line})" if file else ""


def is_installed(file: Path | str) -> bool:
    """Whether a file belongs to a package that somebody installed."""
    return any(part in INSTALLED for part in Path(file).parts)
