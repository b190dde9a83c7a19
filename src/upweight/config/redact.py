"""Credentials, which no file that a run writes may hold."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
IN_TEXT = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # user and password of a URL
    r"|(?<=[?&])(?:[\w-]*(?:token|key|secret|password|sig|signature)=)[^&#\s]+"  # of its query
    r"|\b(?:hf_|sk-)[A-Za-z0-9_-]{16,}",
    re.IGNORECASE,
)
NAMES = re.compile(r"(.*_)?(api_?key|secret|password|authorization|(access|auth|api|hub|bearer)_token)|token", re.I)


def redacted(content: Any) -> Any:
    """Return the same nested content with `***` in place of credentials."""
    if isinstance(content, Mapping):
        named = {key for key, text in content.items() if text and isinstance(text, str) and NAMES.fullmatch(str(key))}
        return {key: HIDDEN if key in named else redacted(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [redacted(value) for value in content]
    return IN_TEXT.sub(HIDDEN, content) if isinstance(content, str) else content
