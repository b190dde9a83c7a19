"""Texts with places for columns."""

import re
from collections.abc import Mapping

PLACES = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def filled(form: str, values: Mapping[str, str]) -> str:
    """`form` with each `{name}` replaced; doubled braces become single ones, names that nobody gave stay."""

    def put(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return values.get(match[1], match[0])

    return PLACES.sub(put, form)
