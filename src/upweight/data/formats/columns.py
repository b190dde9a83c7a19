"""Texts with places for columns."""

import re
from collections.abc import Mapping

from upweight.config.sections.data import UserFormat
from upweight.data.examples import Setup
from upweight.data.raw_row import Row, optional_text

PLACES = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def filled(form: str, values: Mapping[str, str]) -> str:
    """`form` with each `{name}` replaced; doubled braces become single ones, names that nobody gave stay."""

    def put(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return values.get(match[1], match[0])

    return PLACES.sub(put, form)


def prompt_text(
    setup: Setup, row: Row, form: UserFormat, written: str, values: Mapping[str, str], *, usual: str = ""
) -> str:
    """`written` with its places filled; the system text (`usual` for want of one) goes first unless it has a place."""
    said = optional_text(row, setup.entry.field_system or form.field_system) or form.system_prompt or usual
    system = filled(form.system_format, {"system": said}) if said else ""
    text = filled(written, {**values, "system": system})
    return text if "{system}" in written else system + text
