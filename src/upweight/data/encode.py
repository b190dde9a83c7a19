"""Turns raw rows into prepared records: first by a dataset format, then by the tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from upweight.config.sections.data import DataSection, DatasetRow, UserFormat
from upweight.config.view import ConfigView
from upweight.data.examples import Example, Format, Setup
from upweight.data.formats import FORMATS, UNTYPED, USER_DEFINED, kind_of
from upweight.data.raw_row import RawRow, Record, RowError
from upweight.data.sources.transforms import Transform
from upweight.data.tokenize.messages import MessageReader
from upweight.data.tokenize.records import RecordMaker
from upweight.data.tokenize.templates import chat_template
from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError, did_you_mean
from upweight.log import warn_once
from upweight.methods.base import Method
from upweight.user_modules import load_function, local_file

__all__ = ["Encoder", "Record", "RowError", "build_encoder"]

SERVES = {
    "pairs": "preference pairs (dpo, ipo, simpo, orpo, reward models)",
    "labelled": "kto",
    "steps": "process reward models",
    "text": "supervised fine-tuning",
    "prompts": "grpo, gdpo and rloo",
    "ebft": "ebft",
}


def build_encoder(  # noqa: PLR0917
    data: DataSection,
    method: Method,
    entry: DatasetRow,
    entry_index: int,
    tokenizer: Any,
    cfg: ConfigView,
    folder: Path,
    classes: int | None = None,
) -> "Encoder":
    """Build the encoder for the rows of one entry of `datasets` (or `test_datasets`)."""
    template = chat_template(data, entry, tokenizer, folder)
    reader = MessageReader(entry, data.default_system_message)
    setup = Setup(data, entry, method, reader, template, classes)
    transform = _transform(setup, entry_index, tokenizer, cfg, folder)
    read = UNTYPED[kind_of(method)] if transform else _built_in(setup)
    return Encoder(setup, read, transform, tokenizer)


def _built_in(setup: Setup) -> Format:
    kind, name = kind_of(setup.method), setup.entry.type
    if isinstance(name, UserFormat):
        if kind not in USER_DEFINED:
            raise UserError(f"datasets.type: a mapping of columns does not work for {SERVES[kind]}. Name a format.")
        return USER_DEFINED[kind]
    return UNTYPED[kind] if name is None else FORMATS[kind][name]


def _transform(setup: Setup, index: int, tokenizer: Any, cfg: ConfigView, folder: Path) -> Transform | None:
    """Load the user's transform if `type` is not a built-in format."""
    kind, name = kind_of(setup.method), setup.entry.type
    if not isinstance(name, str):
        return None
    if name in FORMATS[kind]:
        if "." in name and (file := local_file(name, folder)):
            warn_once(f"datasets.type: '{name}' is a built-in format; {file} is not used. Rename the file to use it.")
        return None
    other_kinds = [SERVES[other] for other, formats in FORMATS.items() if name in formats]
    if other_kinds:
        raise UserError(f"datasets.type: '{name}' is for {' and '.join(other_kinds)}, not for {setup.method.name}.")
    families = {known.split(".")[0] for formats in FORMATS.values() for known in formats}
    if "." not in name or (name.split(".")[0] in families and not local_file(name, folder)):
        raise UserError(f"datasets.type: there is no format '{name}'.{did_you_mean(name, FORMATS[kind])}")
    try:
        function = load_function(name, folder, "datasets.type")
    except UserError as error:
        if local_file(name, folder) is not None:
            raise
        raise UserError(f"{error} Formats for {setup.method.name}: {', '.join(FORMATS[kind])}.") from error
    return Transform(function, name, _view_for_entry(setup, index, cfg), index, tokenizer)


def _view_for_entry(setup: Setup, index: int, cfg: ConfigView) -> ConfigView:
    """Return the config in which `cfg.datasets[dataset_idx]` is the entry, also for an entry of `test_datasets`."""
    is_entry = [row is setup.entry for row in setup.data.test_datasets]
    if any(is_entry) and is_entry.index(True) == index and "test_datasets" in cfg:
        return ConfigView({**cfg, "datasets": cfg["test_datasets"]})
    return cfg


class Encoder:
    """Turns the rows of one dataset entry into records."""

    def __init__(self, setup: Setup, read: Format, transform: Transform | None, tokenizer: Any) -> None:
        self.setup = setup
        self.read = read
        self.transform = transform
        self.tokens = TextTokens(tokenizer, setup.data.eot_tokens)
        self.maker = RecordMaker(setup, self.tokens)
        self.source_text = (setup.template.written or "") + (transform.source_text if transform else "")

    def __call__(self, row: Mapping[str, Any]) -> list[Record]:
        """Return the records of a row, none if a transform drops it; a bad row raises a RowError."""
        return self.encode_many([row])[0]

    def encode_many(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Record]]:
        """Return the records of each row; the first bad row raises a RowError."""
        examples = [self._examples(row) for row in rows]
        texts = [[self.maker.texts(example) for example in row] for row in examples]
        ids = iter(self.tokens.ids([text for row in texts for example in row for text in example]))
        return [
            [
                self.maker.record(example, [next(ids) for _ in row_texts])
                for example, row_texts in zip(*row, strict=True)
            ]
            for row in zip(examples, texts, strict=True)
        ]

    def _examples(self, row: RawRow) -> list[Example]:
        if not isinstance(row, Mapping):
            raise RowError("row", f"a mapping of columns, got {type(row).__name__}")
        rows: Sequence[RawRow] = self.transform(row) if self.transform else [row]
        return [example for raw_row in rows for example in self.read(self.setup, raw_row)]
