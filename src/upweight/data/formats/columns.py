"""Text templates with `{column}` placeholders."""

import re
from collections.abc import Mapping

from upweight.config.sections.data import UserFormat
from upweight.data.examples import Setup
from upweight.data.raw_row import RawRow, optional_text

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def filled(form: str, values: Mapping[str, str]) -> str:
    """Replace each `{name}` in `form`; doubled braces become single ones, unknown names stay."""
    return PLACEHOLDER.sub(lambda match: match[0][0] if match[1] is None else values.get(match[1], match[0]), form)


def prompt_text(
    setup: Setup, row: RawRow, form: UserFormat, template: str, values: Mapping[str, str], *, default_system: str = ""
) -> str:
    """Fill `template`; the system text (`default_system` if there is none) goes first unless it has a placeholder."""
    content = optional_text(row, setup.entry.field_system or form.field_system) or form.system_prompt or default_system
    system = filled(form.system_format, {"system": content}) if content else ""
    text = filled(template, {**values, "system": system})
    return text if "{system}" in template else system + text
