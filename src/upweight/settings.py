"""Declares YAML keys: a Section has settings, each with a YAML path, a default and a help text."""

import copy
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from upweight.user_modules import PATH

PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]


class UserPath(str):
    """The path of a user's function or class: `mine.name`, or `folder/mine.py:name`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.str_schema(pattern=f"^({PATH.pattern})$")


BOOL_WORDS = {False: ("no", "false", "off", "none", "disabled"), True: ("yes", "true", "on")}


def setting(path: str, default: Any, help: str, *, also: tuple[str, ...] = (), **limits: Any) -> Any:
    """Declare a field that is read from the YAML path `path` or an alias in `also`; `limits` go to pydantic."""
    return Field(default, description=help, json_schema_extra={"path": path, "also": list(also)}, **limits)


def same_setting(section: type["Section"], name: str) -> Any:
    """Declare a field with the path, default and help of a field of another section."""
    return copy.copy(section.model_fields[name])


def inner(default: Any, help: str, **limits: Any) -> Any:
    """Declare a field of a nested mapping, such as an entry of `datasets`, that is read by its field name."""
    return Field(default, description=help, **limits)


class Strict(BaseModel):
    """A frozen model that rejects unknown keys and does not read `true` as a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_means_unset(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if value is not None or key not in cls.model_fields}
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _bool_to_word(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert a bool back to `no` or `off` where the field expects a word; reject it where a number is expected."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        choices = [choice for one in branches(annotation) for choice in get_args(one)]
        takes_bool = {Any, bool}.intersection(branches(annotation)) or any(isinstance(one, bool) for one in choices)
        if takes_bool or not isinstance(value, bool):
            return value
        word = next((word for word in BOOL_WORDS[value] if word in literals(annotation)), None)
        if word is None:
            raise PydanticCustomError("not_a_switch", "a switch where a value is wanted")
        return word


class Section(Strict):
    """A group of settings whose field names may differ from their YAML paths."""


@dataclass(frozen=True)
class Key:
    """A YAML path and the field that it sets."""

    path: str
    name: str
    field: FieldInfo
    canonical: str  # the path in the documentation; differs from `path` for aliases


def keys_of(section: type[Section]) -> Iterator[Key]:
    """Yield every YAML path that a section reads, those of a section that it extends last."""
    for name, field in sorted(section.model_fields.items(), key=lambda item: item[0] not in section.__annotations__):
        extra: Any = field.json_schema_extra
        assert isinstance(extra, dict), f"{section.__name__}.{name} is not declared with setting()"
        for path in (extra["path"], *extra["also"]):
            yield Key(path, name, field, canonical=extra["path"])


def values_by_path(section: Section) -> dict[str, Any]:
    """Return the values of a section by their YAML paths."""
    return {key.path: getattr(section, key.name) for key in keys_of(type(section)) if key.path == key.canonical}


def branches(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union type, without `None` and without `Annotated` metadata."""
    if get_origin(annotation) is Annotated:
        yield from branches(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from branches(part)
    elif annotation is not type(None):
        yield annotation


def literals(annotation: Any) -> Iterator[str]:
    """Yield every choice of the Literals in a type annotation."""
    if get_origin(annotation) is Literal:
        yield from (str(choice) for choice in get_args(annotation))
    elif get_origin(annotation) is not None:
        for part in get_args(annotation):
            yield from literals(part)
