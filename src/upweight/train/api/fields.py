"""Dataclass fields of the config classes: their help and the config setting that they set."""

import dataclasses
from dataclasses import field
from typing import Any

from upweight.settings import Key, Section, keys_of


class Help(str):
    """The help of an argument and the setting it sets; a str, since command-line parsers print the metadata."""

    setting: Key | None = None  # that the argument sets
    no_effect: str | None = None  # why the argument has no effect
    refused: str | None = None  # why the argument may only have its default

    def __new__(cls, text: str, **about: Any) -> "Help":
        self = super().__new__(cls, text)
        vars(self).update(about)
        return self


def help_of(argument: dataclasses.Field[Any]) -> Help:
    """Return the help of an argument."""
    text = argument.metadata.get("help", "")
    return text if isinstance(text, Help) else Help(text)


def field_for(section: type[Section], name: str, **changed: Any) -> Any:
    """Return a field that sets a section's setting, with its default and help; tuples become lists."""
    key = next(key for key in keys_of(section) if key.name == name)
    default = changed.get("default", key.field.default)
    text = Help(key.field.description or "", setting=key)
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return with_help(default, text)


def no_effect(default: Any, why: str) -> Any:
    """Return a field that is accepted without effect, since the loop always does what it sets."""
    return with_help(default, Help(f"Accepted: {why}.", no_effect=why))


def refused(default: Any, why: str) -> Any:
    """Return a field that may only have its default, since the loop cannot do what it asks for."""
    return with_help(default, Help(f"Not supported: {why}.", refused=why))


def with_help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})
