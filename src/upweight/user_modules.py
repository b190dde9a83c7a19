"""Loads the user's functions by dotted path, and describes their errors. Light to import, for reward workers."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from upweight.errors import UserError, did_you_mean

INSTALLED = ("site-packages", "dist-packages")
OURS, STANDARD_LIBRARY = str(Path(__file__).parent), str(Path(os.__file__).parent)


def local_file(path: str, folder: Path) -> Path | None:
    """Return the user's file that a dotted path refers to, or None."""
    module = path.rpartition(".")[0]
    for root in dict.fromkeys((Path.cwd(), folder)):
        stem = root.joinpath(*module.split("."))
        for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if module and file.is_file():
                return file.resolve()
    return None


def load_function(path: str, folder: Path, key: str) -> Callable[..., Any]:
    """Return the function at a dotted path; `key` is the config key for error messages."""
    module_name, _, name = path.rpartition(".")
    file = local_file(path, folder)
    try:
        with redirect_stdout(sys.stderr):
            module = load_file(module_name, file) if file else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            roots = list(dict.fromkeys((Path.cwd(), folder.resolve())))
            near = did_you_mean(module_name, [other.stem for root in roots for other in root.glob("*.py")])
            missing = f"no {module_name.replace('.', '/')}.py in {' or '.join(map(str, roots))}, and no such package"
            raise UserError(f"{key}: there is no '{module_name}': {missing}.{near}") from error
        raise UserError(f"{key}: '{path}' cannot be imported: {error}. Install '{error.name}' first.") from error
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise UserError(f"{key}: '{path}' cannot be imported: {describe_error(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = {other: value for other, value in vars(module).items() if callable(value) and other[0] != "_"}
        known = [other for other, value in public.items() if getattr(value, "__module__", "") == module.__name__]
        hint = did_you_mean(name, public) or (f" It has {', '.join(known[:8])}." if known else "")
        raise UserError(f"{key}: {file or module_name} has no function '{name}'.{hint}")
    return function


def source_of(function: Callable[..., Any]) -> str:
    """Return the source of a function's module and of the user's loaded modules in the same folder."""
    module = sys.modules.get(function.__module__)
    file = file_of(module) if module else None
    if file is None:
        return repr(function)
    texts = {str(file): file.read_text(encoding="utf-8", errors="replace")}
    if not is_installed(file):
        for other in [file_of(loaded) for loaded in list(sys.modules.values()) if isinstance(loaded, ModuleType)]:
            beside = other is not None and file.parent in other.parents and other.suffix == ".py"
            if other is not None and beside and other.is_file() and not is_installed(other):
                texts[str(other)] = other.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text for _, text in sorted(texts.items()))


def load_file(name: str, file: Path) -> ModuleType:
    """Return the module in a file, imported under `name` unless another module has that name."""
    parts = len(name.split(".")) + (file.name == "__init__.py")
    with _importable(file.parents[parts - 1]):
        loaded = sys.modules.get(name)
        if loaded is not None and file_of(loaded) == file:
            return loaded
        if loaded is None:
            module = importlib.import_module(name)
            if file_of(module) == file:
                return module
        # Another module in use has the name, so the user's file gets a different one.
        spec = importlib.util.spec_from_file_location(f"upweight_user.{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def file_of(module: ModuleType) -> Path | None:
    """Return the file of a module, or None."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


@contextmanager
def _importable(root: Path) -> Iterator[None]:
    """Put a folder first on the path while importing, and last afterwards, for imports inside functions."""
    folder = str(root)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def describe_error(error: BaseException) -> str:
    """Return the type, message and location in the user's code of an error."""
    text = str(error).strip()
    shown = (text[:297] + "...") if len(text) > 300 else text
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}{': ' if shown else ''}{shown}{location(frames)}"


def location(frames: list[tuple[str, int]]) -> str:
    """Return the innermost frame of the user's code as ` (file, line n)`; frames begin with the outermost."""
    foreign = [frame for frame in frames if not frame[0].startswith(("<", OURS))]
    foreign = [frame for frame in foreign if is_installed(frame[0]) or not frame[0].startswith(STANDARD_LIBRARY)]
    users = [frame for frame in foreign if not is_installed(frame[0])]
    file, line = (users or foreign or [("", 0)])[-1]
    return f" ({Path(file).name}, line {line})" if file else ""


def is_installed(file: Path | str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(part in INSTALLED for part in Path(file).parts)
