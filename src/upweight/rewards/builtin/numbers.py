"""Parses numbers with signs, currency, thousands separators, percent, fractions and LaTeX."""

import math
import re
import unicodedata
from collections import deque
from typing import NamedTuple

# A last number is looked for at the end only: the work stays small for a completion of any length.
_TAIL = 100_000
_VULGAR = re.compile("([\u00bc-\u00be\u2150-\u215e])")
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w.)\]])[-+])?
    (?:[$€£¥]\s?)?(?P<inner>(?<=[$€£¥])[-+])?
    (?:(?P<whole>\d+)\s(?=\d+/\d))?
    (?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)
    (?P<power>[eE][-+]?\d+)?
    (?:\s?/\s?(?P<below>\d+(?:\.\d+)?))?
    \s?(?P<percent>%)?
    """,
    re.VERBOSE,
)


class Number(NamedTuple):
    value: float
    percent: bool


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", _VULGAR.sub(r" \1", text[-_TAIL:]))
    text = text.replace("\u2212", "-").replace("\u2044", "/").replace("\\$", "$").replace("\\%", "%")
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return _FRAC.sub(_slashed, text) if "\\" in text else text


def _slashed(frac: re.Match[str]) -> str:
    mixed = frac.start() and frac.string[frac.start() - 1].isdigit()
    return f"{' ' if mixed else ''}{frac[1].strip()}/{frac[2].strip()}"


def last_number(text: str) -> Number | None:
    """Text -> its last number, or None when there is none or it is not finite."""
    matches = deque(_NUMBER.finditer(_plain(text)), maxlen=1)
    if not matches:
        return None
    match = matches[0]
    value = float(match["digits"].replace(",", "") + (match["power"] or ""))
    if match["below"]:
        below = float(match["below"])
        value = value / below if below else math.nan
    value += float(match["whole"] or 0)
    if "-" in (match["sign"] or "") or match["inner"] == "-":
        value = -value
    return Number(value, match["percent"] is not None) if math.isfinite(value) else None


def same_number(given: Number, wanted: Number, tolerance: float, relative: float) -> bool:
    """Whether two numbers agree; a percentage agrees with its figure and with its hundredth."""
    readings = [given.value]
    if given.percent and not wanted.percent:
        readings.append(given.value / 100)
    if wanted.percent and not given.percent:
        readings.append(given.value * 100)
    # 1e-12 forgives the rounding of the division in a fraction, nothing a person would see.
    allowed = max(tolerance, max(relative, 1e-12) * abs(wanted.value))
    return any(abs(reading - wanted.value) <= allowed for reading in readings)
