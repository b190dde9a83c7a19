"""A user's transform of rows, as `datasets.type` names it."""

import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from upweight.data.raw_row import Row, RowError
from upweight.errors import UserError
from upweight.user_modules import described, source_of


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
