"""A user's transform of rows, named by `datasets.type`."""

import inspect
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from upweight.data.raw_row import RawRow, RowError
from upweight.errors import UserError
from upweight.user_modules import describe_error, source_of


class Transform:
    """A user's transform: it takes a row and returns the rows it becomes, with all other columns kept."""

    def __init__(self, function: Callable[..., Any], name: str, cfg: Any, dataset_idx: int, tokenizer: Any) -> None:
        self.name = name
        self.source_text = source_of(function)
        factory_result = self._call_factory(function, cfg, dataset_idx)
        is_pair = isinstance(factory_result, tuple) and len(factory_result) == 2
        row_function, options = factory_result if is_pair else (factory_result, {})
        if not callable(row_function) or not isinstance(options, dict):
            raise UserError(f"datasets.type: '{name}' must return a function of a row, alone or with options.")
        self.row_function: Callable[..., Any] = row_function
        self.removed = options.get("remove_columns") or []
        self.batched = bool(options.get("batched"))
        self.tokenizer_argument = _tokenizer_argument(self.row_function, tokenizer)

    def _call_factory(self, function: Callable[..., Any], cfg: Any, dataset_idx: int) -> Any:
        parameters = inspect.signature(function).parameters.values()
        takes_index = any(p.kind is p.VAR_KEYWORD or p.name == "dataset_idx" for p in parameters)
        try:
            with redirect_stdout(sys.stderr):
                return function(cfg, dataset_idx=dataset_idx) if takes_index else function(cfg)
        except (Exception, SystemExit) as error:  # foreign code
            raise UserError(f"datasets.type: '{self.name}' failed: {describe_error(error)}") from error

    def __call__(self, row: RawRow) -> list[dict[str, Any]]:
        """Return the rows that a row becomes; none if the transform drops it."""
        argument = {key: [value] for key, value in row.items()} if self.batched else dict(row)
        try:
            with redirect_stdout(sys.stderr):  # stdout is for the rows that `preprocess --show` prints
                result = self.row_function(argument, **self.tokenizer_argument)
        except (Exception, SystemExit) as error:  # foreign code
            expected = f"a row that this transform can read; it failed with {describe_error(error)}"
            raise RowError(self.name, expected) from error
        if result is None:
            return []
        if not isinstance(result, dict):
            raise RowError(self.name, f"a mapping of columns or None from this transform, got {type(result).__name__}")
        kept = {} if self.removed == "__all__" else {k: v for k, v in row.items() if k not in self.removed}
        if not self.batched:
            return [kept | result]
        return [kept | columns for columns in self._rows(result)]

    def _rows(self, columns: dict[str, Any]) -> list[dict[str, Any]]:
        if not all(isinstance(values, list | tuple) for values in columns.values()):
            raise RowError(self.name, "a list for each column from this batched transform")
        if len({len(values) for values in columns.values()}) > 1:
            raise RowError(self.name, "columns of one length from this batched transform")
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _tokenizer_argument(function: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    """Return the tokenizer under the parameter name of a row function; empty if it takes none."""
    parameters = inspect.signature(function).parameters
    for name in ("tokenizer", "processing_class"):
        if name in parameters:
            return {name: tokenizer}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"tokenizer": tokenizer} if takes_any else {}
