"""The result of one check of `upweight doctor`: a message, its level, the measurements and the remedy."""

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "alarm"]


@dataclass(frozen=True)
class Finding:
    """The result of one check; warnings and alarms need the user to act."""

    level: Level
    what: str
    says: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        return self.level in ("warning", "alarm")
