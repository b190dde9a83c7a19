"""Examples that formats build from rows: text before tokenization, one class for each kind of training data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from upweight.config.sections.data import DataSection, DatasetRow, UserFormat
from upweight.data.raw_row import RawRow
from upweight.data.tokenize.messages import MessageReader
from upweight.data.tokenize.templates import ChatTemplate
from upweight.methods.base import Method

DEFAULT_COLUMNS = UserFormat()


@dataclass(frozen=True)
class Pair:
    """A prompt with its chosen and its rejected completion."""

    prompt: str
    chosen: str
    rejected: str
    margin: float | None = None


@dataclass(frozen=True)
class Labelled:
    """A prompt, a completion, and whether the completion is desirable."""

    prompt: str
    completion: str
    label: bool


@dataclass(frozen=True)
class Steps:
    """A prompt, the steps of a completion, and the class of each step."""

    prompt: str
    completions: list[str]
    labels: list[int]


@dataclass(frozen=True)
class Span:
    """A range of characters that is trained on: the text of one turn."""

    start: int
    end: int
    holes: tuple[tuple[int, int], ...] = ()  # ranges inside it that are not trained on


@dataclass(frozen=True)
class Text:
    """One text and the ranges of it that are trained on."""

    text: str
    spans: list[Span]
    shown: dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """A row that was tokenized before: the columns of its record."""

    columns: dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the row holds it, its rendered text, the columns for rewards, and the true continuation for EBFT."""

    prompt: str | list[dict[str, Any]]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    # The true completion as the template writes it; then, in turn, the text up to the next completion, and that one.
    truth: tuple[str, ...] = ()


Example = Pair | Labelled | Steps | Text | Tokens | Prompt


@dataclass(frozen=True)
class Setup:
    """Everything that a format reads besides the row."""

    data: DataSection
    entry: DatasetRow
    method: Method
    reader: MessageReader
    template: ChatTemplate
    classes: int | None = None  # outputs of the score head, if known

    @property
    def form(self) -> UserFormat:
        """The column names of the config if `type` is a mapping, else the default ones."""
        return self.entry.type if isinstance(self.entry.type, UserFormat) else DEFAULT_COLUMNS


Format = Callable[[Setup, RawRow], list[Example]]
