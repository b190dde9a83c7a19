"""A user's code by dotted path or file, and errors out of it; light to import, since the processes of rewards do it."""

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
    """The user's file that a dotted path would be read from, if there is one."""
    module = path.rpartition(".")[0]
    for root in dict.fromkeys((Path.cwd(), folder)):
        place = root.joinpath(*module.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if module and file.is_file():
                return file.resolve()
    return None


def load_function(path: str, folder: Path, key: str) -> Callable[..., Any]:
    """The function at a dotted path; `key` is the config key that names it."""
    module_name, _, name = path.rpartition(".")
    file = local_file(path, folder)
    try:
        with redirect_stdout(sys.stderr):
            module = load_file(module_name, file) if file else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            roots = list(dict.fromkeys((Path.cwd(), folder.resolve())))
            near = did_you_mean(module_name, [other.stem for root in roots for other in root.glob("*.py")])
            raise UserError(
                f"{key}: there is no '{module_name}': no {module_name.replace('.', '/')}.py in "
                f"{' or '.join(map(str, roots))}, and no installed package of that name.{near}"
            ) from error
        raise UserError(f"{key}: '{path}' cannot be imported: {error}. Install '{error.name}' first.") from error
    except (Exception, SystemExit) as error:  # importing runs foreign code
        raise UserError(f"{key}: '{path}' cannot be imported: {described(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        own = {other: value for other, value in vars(module).items() if callable(value) and not other.startswith("_")}
        known = [other for other, value in own.items() if getattr(value, "__module__", "") == module.__name__]
        hint = did_you_mean(name, own) or (f" It has {', '.join(known[:8])}." if known else "")
        raise UserError(f"{key}: {file or module_name} has no function '{name}'.{hint}")
    return function


def source_of(function: Callable[..., Any]) -> str:
    """The text of the module that holds a function and of the user's modules beside it that are loaded."""
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
