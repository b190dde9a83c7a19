"""What a format makes of a row: text, not yet tokens. One shape for each kind of training data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from upweight.config.sections.data import DataSection, DatasetRow, UserFormat
from upweight.data.raw_row import Row
from upweight.data.tokenize.messages import MessageReader
from upweight.data.tokenize.templates import ChatTemplate
from upweight.methods.base import Method

USUAL = UserFormat()


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers, the better one first."""

    prompt: str
    chosen: str
    rejected: str
    margin: float | None = None


@dataclass(frozen=True)
class Labelled:
    """A prompt, an answer, and whether the answer is wanted."""

    prompt: str
    completion: str
    label: bool


@dataclass(frozen=True)
class Steps:
    """A prompt, the steps of an answer, and the class of each step."""

    prompt: str
    completions: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Span:
    """A stretch of text that somebody wrote in one turn."""

    start: int
    end: int
    holes: tuple[tuple[int, int], ...] = ()  # stretches inside it that are not trained on


@dataclass(frozen=True)
class Text:
    """One text and the stretches of it that are trained on."""

    text: str
    spans: list[Span]
    shown: dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """What came as token ids: the columns that its record has."""

    columns: dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the row gave it, its text, the columns that rewards will see, and what is known to follow."""

    prompt: str | list[dict[str, Any]]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    # The true answer as the template writes it; then, in turn, what others said up to the next answer, and that answer.
    truth: tuple[str, ...] = ()


Example = Pair | Labelled | Steps | Text | Tokens | Prompt


@dataclass(frozen=True)
class Setup:
    """All that a format may look at besides the row."""

    data: DataSection
    entry: DatasetRow
    method: Method
    reader: MessageReader
    template: ChatTemplate
    classes: int | None = None  # outputs of the score head, where known

    @property
    def form(self) -> UserFormat:
        """The columns that the config names, where `type` is a mapping; else the usual ones."""
        return self.entry.type if isinstance(self.entry.type, UserFormat) else USUAL


Format = Callable[[Setup, Row], list[Example]]
