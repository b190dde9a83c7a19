"""Loads the user's functions and classes by path, checks their options, and describes their errors.

A path is dotted (`mine.loss`) or has the file in it (`folder/mine.py:loss`). Light to import, for reward workers.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from upweight.errors import UserError, did_you_mean

INSTALLED = ("site-packages", "dist-packages")
OURS, STANDARD_LIBRARY = str(Path(__file__).parent), str(Path(os.__file__).parent)
CELL = "<ipython-input-"  # as IPython in a terminal names them
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
PATH = re.compile(r"[^:]+\.py:\w+|[A-Za-z_]\w*(\.\w+)+")
CODE: dict[str, dict[str, str]] = {}  # the user's files that this process loaded: `module.name` -> file and digest


def is_path(value: Any) -> bool:
    """Whether a value has the form of a path to a user's function or class: `mine.loss`, `folder/mine.py:loss`."""
    return isinstance(value, str) and PATH.fullmatch(value) is not None


def local_file(path: str, folder: Path) -> Path | None:
    """Return the user's file that a path refers to, or None."""
    named, _, _ = path.partition(":")
    module = path.rpartition(".")[0]
    for root in dict.fromkeys((Path.cwd(), folder)):
        stem = root.joinpath(*module.split("."))
        files = [root / named] if ":" in path else [stem.with_name(f"{stem.name}.py"), stem / "__init__.py"]
        for file in files:
            if module and file.is_file():
                return file.resolve()
    return None


def problem_unrun(path: str, folder: Path) -> str | None:
    """Return why a function cannot be at a path, by its file, which is not run; None where it may be there."""
    file, (module, _, name) = local_file(path, folder), path.rpartition(":" if ":" in path else ".")
    if file is not None:
        return _undefined(file, name)
    if not module.isidentifier() or importlib.util.find_spec(module) is not None:
        return None
    near = did_you_mean(module, {other.stem for root in (Path.cwd(), folder) for other in root.glob("*.py")})
    return f"there is no {module}.py here, and no such package.{near}" if near else None


def _undefined(file: Path, name: str) -> str | None:
    """Return why a file has no function of a name; None where it may have one."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except SyntaxError as error:
        return f"{file}, line {error.lineno}: {error.msg}."
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}."
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {alias.asname or alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    if "*" in imported or "__getattr__" in defined or name in defined | names | imported:
        return None
    public = sorted(one for one in defined if not one.startswith("_"))
    hint = did_you_mean(name, public) or (f" It has {', '.join(public[:8])}." if public else "")
    return f"{file} has no function '{name}'.{hint}"


def load_function(path: str, folder: Path, key: str) -> Callable[..., Any]:
    """Return the function or class at a path; `key` is the config key for error messages."""
    lead = f"{key}: " if key else ""
    file = local_file(path, folder)
    module_name, _, name = path.rpartition(":" if ":" in path else ".")
    if ":" in path:
        if file is None:
            roots = " or ".join(map(str, dict.fromkeys((Path.cwd(), folder.resolve()))))
            raise UserError(f"{lead}there is no file {module_name} in {roots}.")
        module_name = file.stem
    try:
        with redirect_stdout(sys.stderr):
            module = load_file(module_name, file) if file else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            roots = list(dict.fromkeys((Path.cwd(), folder.resolve())))
            near = did_you_mean(module_name, [other.stem for root in roots for other in root.glob("*.py")])
            missing = f"no {module_name.replace('.', '/')}.py in {' or '.join(map(str, roots))}, and no such package"
            raise UserError(f"{lead}there is no '{module_name}': {missing}.{near}") from error
        raise UserError(f"{lead}'{path}' cannot be imported: {error}. Install '{error.name}' first.") from error
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise UserError(f"{lead}'{path}' cannot be imported: {describe_error(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = {other: value for other, value in vars(module).items() if callable(value) and other[0] != "_"}
        known = [other for other, value in public.items() if getattr(value, "__module__", "") == module.__name__]
        hint = did_you_mean(name, public) or (f" It has {', '.join(known[:8])}." if known else "")
        raise UserError(f"{lead}{file or module_name} has no function '{name}'.{hint}")
    code = f"{module_name}.{name}"
    if file is not None and code not in CODE:  # what was imported, though the file may change during the run
        CODE[code] = {"file": str(file), "digest": hashlib.sha256(file.read_bytes()).hexdigest()}
    return function


def changed_code(before: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence for each of the user's files that moved or changed, from `CODE` as it was before."""
    sentences = []
    for path, was in before.items():
        if (now := CODE.get(path)) is None or now == was:
            continue
        moved = f"now comes from {now['file']}, then from {was['file']}" if now["file"] != was["file"] else ""
        changed = f"{now['file']} was changed since" if now["digest"] != was["digest"] else ""
        sentences.append(f"'{path}': {' and '.join(filter(None, (moved, changed)))}")
    return sentences


def asked_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that a function or class asks for."""
    return tuple(name for name, one in inspect.signature(function).parameters.items() if one.kind not in OPEN)


def bind_options(
    function: Callable[..., Any], options: Mapping[str, Any], key: str, name: str, provided: Collection[str] = ()
) -> dict[str, Any]:
    """Return a function's or class's options as keyword arguments, checked by its signature and annotations.

    `provided` are the names of the arguments that the caller passes. A parameter annotated with a pydantic model gets
    all the options. Every error is raised at once; `key` is the config key of the options, `name` that of the function.
    """
    from pydantic import BaseModel

    parameters = inspect.signature(function).parameters
    hints = _annotations(function)
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    settable = {one: spec for one, spec in parameters.items() if spec.kind not in OPEN and one not in provided}
    models = {one: kind for one in settable if inspect.isclass(kind := hints.get(one)) and issubclass(kind, BaseModel)}
    if models:
        argument, kind = next(iter(models.items()))
        return {argument: _validated(kind, dict(options), key)}
    problems = [
        f"{key}.{one}: '{name}' has no such setting.{did_you_mean(one, settable) or _listing('It has', settable)}"
        for one in options
        if one not in settable and not open_ended
    ]
    for one, spec in settable.items():
        if spec.kind is inspect.Parameter.POSITIONAL_ONLY:
            problems.append(f"'{name}' takes '{one}' by position only; arguments are passed by name: drop the '/'.")
        elif spec.default is inspect.Parameter.empty and one not in options:
            hint = did_you_mean(one, provided) or _listing("It can ask for", provided)
            problems.append(f"'{name}' asks for '{one}', which is neither passed to it nor set under '{key}'.{hint}")
    bound: dict[str, Any] = {}
    for one, value in options.items():
        try:
            bound[one] = _validated(hints[one], value, f"{key}.{one}") if one in hints and one in settable else value
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return bound


def _listing(words: str, names: Collection[str]) -> str:
    return f" {words} {', '.join(names)}." if names else ""


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # names that exist only for type checkers
        return {}


def _validated(kind: Any, value: Any, key: str) -> Any:
    """Return a value as the type that an annotation asks for; a type that pydantic does not know takes any."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticSchemaGenerationError

    fields = getattr(kind, "model_fields", None)
    if fields is not None and kind.model_config.get("extra") != "allow":
        known = _names_in_options(kind)
        lines = [
            f"{key}.{one}: no such setting.{did_you_mean(one, known) or _listing('There is', known)}"
            for one in value
            if one not in known
        ]
        if lines:
            raise UserError("\n".join(lines))
    try:
        return TypeAdapter(kind).validate_python(value)
    except PydanticSchemaGenerationError:
        return value
    except ValidationError as error:
        items = [(".".join([key, *map(str, one["loc"])]), one) for one in error.errors(include_url=False)]
        lines = [f"{where}: {one['msg'][:1].lower()}{one['msg'][1:]}, got {one['input']!r}." for where, one in items]
        raise UserError("\n".join(lines)) from None


def _names_in_options(model: Any) -> list[str]:
    """Return the names by which a pydantic model takes its fields: their aliases, or the names themselves."""
    by_name = any(model.model_config.get(rule) for rule in ("populate_by_name", "validate_by_name"))
    names: list[str] = []
    for name, field in model.model_fields.items():
        alias = field.validation_alias or field.alias
        choices = getattr(alias, "choices", [alias] if alias else [])
        aliases = [one if isinstance(one, str) else str(one.path[0]) for one in choices]
        names += aliases + ([name] if by_name or not aliases else [])
    return names


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


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn errors of the user's code into one line that says what failed and where."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's code
        if type(error).__name__ == "OutOfMemoryError":  # the trainer's to mend
            raise
        raise UserError(f"{what}: {describe_error(error)}") from error


def named_method(kind: type, name: str, what: str) -> Callable[..., Any]:
    """Return a method of a class with errors that say what failed and where."""
    return named_call(getattr(kind, name), f"{what} failed in {name}")


def named_call(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function with errors that say what failed and where."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with named_errors(what):
            return function(*arguments, **options)

    return call


def describe_error(error: BaseException) -> str:
    """Return the type, message and location in the user's code of an error."""
    text = str(error).strip()
    shown = (text[:297] + "...") if len(text) > 300 else text
    return f"{type(error).__name__}{': ' if shown else ''}{shown}{line_of_error(error)}"


def line_of_error(error: BaseException) -> str:
    """Return where in the user's code an error was raised, as ` (file, line n)`."""
    return location([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def line_of(function: Callable[..., Any]) -> str:
    """Return where a user's function is defined, as ` (file, line n)`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _place(code.co_filename, code.co_firstlineno) if code else ""


def location(frames: list[tuple[str, int]]) -> str:
    """Return the innermost frame of the user's code as ` (file, line n)`; frames begin with the outermost."""
    foreign = [frame for frame in frames if frame[0].startswith(CELL) or not frame[0].startswith(("<", OURS))]
    foreign = [frame for frame in foreign if is_installed(frame[0]) or not frame[0].startswith(STANDARD_LIBRARY)]
    users = [frame for frame in frames if _is_users(frame[0])]
    file, line = (users or foreign or [("", 0)])[-1]
    return _place(file, line) if file else ""


def from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame of the user's code on; all of it where there is none."""
    inner = trace
    while inner is not None and not _is_users(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return inner or trace


def _is_users(file: str) -> bool:
    """Whether a frame's file is neither ours, nor Python's, nor of an installed package."""
    is_ours = file.startswith(("<", OURS)) and not file.startswith(CELL)
    return not is_ours and not file.startswith(STANDARD_LIBRARY) and not is_installed(file)


def _place(file: str, line: int) -> str:
    """Return ` (file, line n)`; of a notebook's cell, whose file has a number for a name, the line itself."""
    if Path(file).parent.name.startswith("ipykernel_") or file.startswith(CELL):
        return f" (line {line} of its cell: {linecache.getline(file, line).strip()})"
    return f" ({Path(file).name}, line {line})"


def is_installed(file: Path | str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(part in INSTALLED for part in Path(file).parts)
