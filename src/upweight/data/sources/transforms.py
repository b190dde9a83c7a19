"""A user's own code by dotted path: a file beside the config or in the working directory, or a package."""

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from upweight.config.explain import did_you_mean
from upweight.data.raw_row import Row, RowError
from upweight.errors import UserError
from upweight.user_modules import described, file_of, is_installed, load_file


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


class Transform:
    """A user's transform: a row in, the rows it becomes out, with untouched columns kept."""

    def __init__(self, function: Callable[..., Any], name: str, cfg: Any, dataset_idx: int, tokenizer: Any) -> None:
        self.name = name
        self.source_text = source_of(function)
        made = self._make(function, cfg, dataset_idx)
        row_function, options = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not callable(row_function) or not isinstance(options, dict):
            raise UserError(f"datasets.type: '{name}' must return a function of a row, alone or with options.")
        self.row_function: Callable[..., Any] = row_function
        self.removed = options.get("remove_columns") or []
        self.batched = bool(options.get("batched"))
        self.extra = _tokenizer_argument(self.row_function, tokenizer)

    def _make(self, function: Callable[..., Any], cfg: Any, dataset_idx: int) -> Any:
        parameters = inspect.signature(function).parameters.values()
        takes_index = any(p.kind is p.VAR_KEYWORD or p.name == "dataset_idx" for p in parameters)
        try:
            with redirect_stdout(sys.stderr):
                return function(cfg, dataset_idx=dataset_idx) if takes_index else function(cfg)
        except (Exception, SystemExit) as error:  # foreign code
            raise UserError(f"datasets.type: '{self.name}' failed: {described(error)}") from error

    def __call__(self, row: Row) -> list[dict[str, Any]]:
        """The rows that a row becomes; none where the transform drops it."""
        given = {key: [value] for key, value in row.items()} if self.batched else dict(row)
        try:
            with redirect_stdout(sys.stderr):  # what a user prints must not mix with rows that are shown
                made = self.row_function(given, **self.extra)
        except (Exception, SystemExit) as error:  # foreign code
            expected = f"a row that this transform can read; it failed with {described(error)}"
            raise RowError(self.name, expected) from error
        if made is None:
            return []
        if not isinstance(made, dict):
            raise RowError(self.name, f"a mapping of columns or None from this transform, found {type(made).__name__}")
        kept = {} if self.removed == "__all__" else {k: v for k, v in row.items() if k not in self.removed}
        if not self.batched:
            return [kept | made]
        return [kept | one for one in self._rows(made)]

    def _rows(self, columns: dict[str, Any]) -> list[dict[str, Any]]:
        if not all(isinstance(values, list | tuple) for values in columns.values()):
            raise RowError(self.name, "a list for each column from this batched transform")
        if len({len(values) for values in columns.values()}) > 1:
            raise RowError(self.name, "columns of one length from this batched transform")
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _tokenizer_argument(function: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    """The tokenizer under the name that a row function takes it by, if it takes it."""
    parameters = inspect.signature(function).parameters
    for name in ("tokenizer", "processing_class"):
        if name in parameters:
            return {name: tokenizer}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"tokenizer": tokenizer} if takes_any else {}
