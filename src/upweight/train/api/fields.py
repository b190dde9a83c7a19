"""Arguments of config classes: what each does, and the setting it is handed to."""

import dataclasses
from dataclasses import field
from typing import Any

from upweight.settings import Key, Section, keys_of


class Help(str):
    """What an argument does, and where it goes; a text, since command-line parsers hand a field's metadata on."""

    section: type[Section] | None = None  # that the argument is handed to,
    setting: Key | None = None  # as this
    holds: str | None = None  # why it changes nothing


def help_of(argument: dataclasses.Field[Any]) -> Help:
    """What is known of an argument; of transformers' own, its text."""
    known = argument.metadata.get("help", "")
    return known if isinstance(known, Help) else Help(known)


def of(section: type[Section], name: str, **changed: Any) -> Any:
    """A field that is handed to a section's setting, with its default and help; lists where the section has tuples."""
    key = next(key for key in keys_of(section) if key.name == name)
    default = changed.get("default", key.field.default)
    text = Help(key.field.description)
    text.section, text.setting = section, key
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


def holds(default: Any, why: str) -> Any:
    """A field that may be set and changes nothing, since what it asks for is so anyway."""
    text = Help(f"Accepted: {why}.")
    text.holds = why
    return field(default=default, metadata={"help": text})


def with_help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})
