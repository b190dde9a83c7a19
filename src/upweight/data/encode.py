"""Turns raw rows into prepared records: first by a dataset format, then by the tokenizer."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.view import ConfigView
from upweight.data.chat_rows import read_as_messages
from upweight.data.examples import Example, Setup, records_of
from upweight.data.formats import FORMATS, format_of
from upweight.data.raw_row import Record, Row, RowError
from upweight.data.sources.transforms import RowFilter, Transform
from upweight.data.tokenize.messages import MessageReader
from upweight.data.tokenize.templates import chat_template
from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError, did_you_mean
from upweight.log import warn_once
from upweight.methods.base import Method
from upweight.user_modules import load_function, local_file, source_of


def build_encoder(  # noqa: PLR0917
    data: DataSection,
    method: Method,
    entry: DatasetSpec,
    entry_index: int,
    tokenizer: Any,
    cfg: ConfigView,
    folder: Path,
    classes: int | None = None,
) -> "Encoder":
    """Build the encoder for the rows of one entry of `datasets` (or `test_datasets`)."""
    template = chat_template(data, entry, tokenizer, folder)
    reader = MessageReader(entry, data.default_system_message)
    sees, function = method.teacher_sees, None
    if sees is not None and "{" not in sees:
        function = load_function(sees, folder, "distill.privileged_prompt")
    tokens = TextTokens(tokenizer, data.eot_tokens)
    setup = Setup(data, entry, method, reader, template, tokens, classes, function)
    if any(row is entry for row in data.test_datasets):  # a transform sees its entry as `cfg.datasets[dataset_idx]`
        cfg = ConfigView({**cfg, "datasets": cfg.get("test_datasets")})
    chosen = RowFilter(load_function(entry.filter, folder, "datasets.filter"), entry.filter) if entry.filter else None
    return Encoder(setup, _transform(setup, entry_index, cfg, folder), chosen)


def _transform(setup: Setup, index: int, cfg: ConfigView, folder: Path) -> Transform | None:
    """Load the user's transform if `type` is not a built-in format."""
    formats, name = FORMATS[setup.method.formats()], setup.entry.type
    if name is None and (read_row := type(setup.method).read_row) is not None:
        transform = Transform(lambda cfg: read_row, f"{setup.method.name}.read_row", cfg, index, setup.tokens.tokenizer)
        transform.source_text = source_of(read_row)
        return transform
    if not isinstance(name, str):
        return None
    file = local_file(name, folder) if "." in name else None
    if name in formats:
        if file:
            warn_once(f"datasets.type: '{name}' is a built-in format; {file} is not used. Rename the file to use it.")
        return None
    families = {known.split(".")[0] for names in FORMATS.values() for known in names}
    if name.split(".")[0] in families and not file:
        raise UserError(f"datasets.type: there is no format '{name}'.{did_you_mean(name, formats)}")
    try:
        function = load_function(name, folder, "datasets.type")
    except UserError as error:
        if file:
            raise
        raise UserError(f"{error} Formats for {setup.method.name}: {', '.join(formats)}.") from error
    return Transform(function, name, cfg, index, setup.tokens.tokenizer)


class Encoder:
    """Turns the rows of one dataset entry into records."""

    def __init__(self, setup: Setup, transform: Transform | None, row_filter: RowFilter | None = None) -> None:
        self.setup, self.transform, self.filter = setup, transform, row_filter
        self.read = format_of(setup.method.formats(), None if transform else setup.entry.type)
        if setup.entry.as_messages:
            self.read = partial(read_as_messages, format_of(setup.method.formats(), None))
        functions = [function.source_text for function in (transform, row_filter) if function]
        functions += [source_of(setup.teacher_prompt)] if setup.teacher_prompt else []
        self.source_text = "".join([setup.template.source or "", *functions])

    def __call__(self, row: Mapping[str, Any]) -> list[Record]:
        """Return the records of a row, none if a filter or a transform drops it; a bad row raises a RowError."""
        return self.encode_many([row])[0]

    def encode_many(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Record]]:
        """Return the records of each row; the first bad row raises a RowError."""
        examples: list[list[Example]] = []
        for row in rows:
            if not isinstance(row, Mapping):
                raise RowError("row", f"a mapping of columns, got {type(row).__name__}")
            if self.filter and not self.filter(row):
                examples.append([])
                continue
            read_rows = self.transform(row) if self.transform else [row]
            examples.append([example for read_row in read_rows for example in self.read(self.setup, Row(read_row))])
        texts = [[example.texts(self.setup) for example in row] for row in examples]
        ids = iter(self.setup.tokens.ids([text for row in texts for several in row for text in several]))
        records = []
        for row_examples, row_texts in zip(examples, texts, strict=True):
            counts = zip(row_examples, map(len, row_texts), strict=True)
            of_each = [records_of(example, self.setup, list(islice(ids, count))) for example, count in counts]
            records.append([record for several in of_each for record in several])
        return records
