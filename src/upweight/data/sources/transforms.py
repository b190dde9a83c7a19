"""A user's functions of rows: the transform that `datasets.type` names, and the filter."""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

from upweight.data.raw_row import RowError
from upweight.errors import UserError
from upweight.user_modules import describe_error, source_of


class Transform:
    """A user's transform: it takes a row and returns the rows it becomes, with all other columns kept."""

    def __init__(self, function: Callable[..., Any], name: str, cfg: Any, dataset_idx: int, tokenizer: Any) -> None:
        self.name = name
        self.source_text = source_of(function)
        index = {"dataset_idx": dataset_idx} if _has_parameter(function, "dataset_idx") else {}
        try:
            with redirect_stdout(sys.stderr):
                result = function(cfg, **index)
        except (Exception, SystemExit) as error:  # foreign code
            raise UserError(f"datasets.type: '{name}' failed: {describe_error(error)}") from error
        row_function, options = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not callable(row_function) or not isinstance(options, dict):
            raise UserError(f"datasets.type: '{name}' must return a function of a row, alone or with options.")
        self.row_function: Callable[..., Any] = row_function
        self.removed = options.get("remove_columns") or []
        self.batched = bool(options.get("batched"))
        parameters = inspect.signature(row_function).parameters
        argument = next((name for name in ("tokenizer", "processing_class") if name in parameters), "tokenizer")
        self.tokenizer_argument = {argument: tokenizer} if _has_parameter(row_function, argument) else {}

    def __call__(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
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
        if not all(isinstance(values, list | tuple) for values in result.values()):
            raise RowError(self.name, "a list for each column from this batched transform")
        if len({len(values) for values in result.values()}) > 1:
            raise RowError(self.name, "columns of one length from this batched transform")
        return [kept | dict(zip(result, values, strict=True)) for values in zip(*result.values(), strict=True)]


class RowFilter:
    """A user's filter: it takes a row and returns whether the row is kept."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name, self.source_text = function, name, source_of(function)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        try:
            with redirect_stdout(sys.stderr):
                return bool(self.function(dict(row)))
        except (Exception, SystemExit) as error:  # foreign code
            expected = f"a row that this filter can read; it failed with {describe_error(error)}"
            raise RowError(self.name, expected) from error


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
