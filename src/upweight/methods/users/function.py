"""A setting whose value is a user's function, and the function bound to its options."""

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from upweight.errors import UserError
from upweight.user_modules import asked_names, bind_options, file_of, is_installed, is_path, load_function, named_errors

OPTIONS = "method_args"
OPTIONS_HELP = "Settings of your functions, by the names of their arguments."


class UserFunction(str):
    """A user's function; as a text it is the path by which a config can name it, which files and pickles hold."""

    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "UserFunction":
        """Return a function of a script, or one that was loaded."""
        if inspect.isclass(function):
            raise UserError(f"'{function.__name__}' is a class; name a function, or a method as 'rl: mine.Method'")
        self = cls(path_of(function))
        self.function = function
        return self

    @property
    def name(self) -> str:
        """The function's module and name."""
        return name_of(self.function)

    @property
    def asks(self) -> tuple[str, ...]:
        """The names of its arguments."""
        return asked_names(self.function)

    def __reduce__(self) -> Any:
        return str, (str(self),)

    def __deepcopy__(self, memo: Any) -> "UserFunction":
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        as_text = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.with_info_plain_validator_function(cls._validated, serialization=as_text)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": r"[.:]\w+$", "description": "Your function: mine.name or file.py:name."}

    @classmethod
    def _validated(cls, value: Any, info: ValidationInfo) -> "UserFunction":
        if isinstance(value, UserFunction):
            return value
        if is_path(value):
            folder = (info.context or {}).get("folder", Path.cwd())
            return cls.of(load_function(value, folder, ""))
        if not callable(value):
            raise PydanticCustomError("no_function", "expected a function")
        return cls.of(value)


def name_of(function: Callable[..., Any]) -> str:
    """Return the module and name of a user's function or class."""
    module = str(getattr(function, "__module__", "")).removeprefix("upweight_user.")
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def path_of(function: Callable[..., Any]) -> str:
    """Return a path to a function or class that holds from any folder: with its file, if that is the user's."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = file_of(module) if module else None
    if file is None or is_installed(file):
        return name_of(function)
    return f"{file}:{getattr(function, '__name__', type(function).__name__)}"


@dataclass
class Call:
    """A user's function with its options: calls it with what it asks for, and names it in errors."""

    key: str  # in the config
    function: UserFunction
    asks: tuple[str, ...]  # arguments that are passed to it, without its options
    options: Mapping[str, Any]
    calls: int = field(default=0, compare=False)
    cut_tried: bool = field(default=False, compare=False)  # whether a part of a micro-batch was tried by itself

    @property
    def where(self) -> str:
        return f"{self.key}: '{self.function.name}'"

    def __call__(self, values: Mapping[str, Callable[[], Any]], settings: object) -> Any:
        """Return the function's result; `values` are computed when asked for, the rest are fields of `settings`."""
        self.calls += 1
        arguments = {name: values[name]() if name in values else vars(settings)[name] for name in self.asks}
        with named_errors(f"{self.where} failed"):
            return self.function.function(**arguments, **self.options)


def bind(
    functions: Sequence[tuple[str, Any, Collection[str]]], options: Mapping[str, Any], settings: Collection[str]
) -> dict[str, Call]:
    """Return the users' functions among (key, value, names it can ask for) by their keys, with their options checked.

    Each function gets the options that it takes; one that no function takes is an error. All can ask for `settings`.
    """
    users = [(key, one, [*names, *settings]) for key, one, names in functions if isinstance(one, UserFunction)]
    if options and not users:
        keys = " or ".join(dict.fromkeys(key for key, _, _ in functions))
        raise ValueError(f"{OPTIONS}: has no effect unless {keys} names a function of yours")
    rest, problems, calls = dict(options), [], {}
    for number, (key, one, names) in enumerate(users):
        taken = [name for name in one.asks if name not in names]
        last = number == len(users) - 1  # reports the options that none takes
        others = {name for _, other, _ in users if other is not one for name in other.asks}
        given = {name: value for name, value in rest.items() if name in taken or (last and name not in others)}
        try:
            bound = bind_options(one.function, given, OPTIONS, one.name, names)
        except UserError as error:
            problems.append(str(error))
        else:
            calls[key] = Call(key, one, tuple(name for name in one.asks if name in names and name not in bound), bound)
    if problems:
        raise ValueError("\n".join(problems))
    return calls
