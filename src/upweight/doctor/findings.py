"""What a check comes to: a line for people, with what was measured and what to do."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "alarm"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; warnings and alarms want something to be done."""

    level: Level
    what: str
    says: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> bool:
        return self.level in ("warning", "alarm")

    def line(self) -> str:
        """The finding for the terminal."""
        remedy = f" Remedy: {self.remedy}." if self.remedy else ""
        return f"{self.level}: {self.what}: {self.says}.{remedy}"

    def as_plain(self) -> dict[str, Any]:
        """The finding for JSON."""
        return asdict(self)
