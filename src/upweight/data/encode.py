"""Turns raw rows into prepared records: first by a dataset format, then by the tokenizer."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.view import ConfigView
from upweight.data.chat_rows import read_as_messages
from upweight.data.examples import Example, Format, Setup, records_of
from upweight.data.formats import FORMATS, format_of
from upweight.data.formats.markup import FAMILIES, family_of
from upweight.data.images.marks import GENERIC, Loaded, expanded, is_conversation, missing_images, texts_of
from upweight.data.images.records import COMPLETIONS, with_images
from upweight.data.images.row_images import COLUMNS, RowImages
from upweight.data.raw_row import Record, Row, RowError, marked, with_messages
from upweight.data.sources.transforms import RowFilter, Transform
from upweight.data.tokenize.messages import MessageReader
from upweight.data.tokenize.templates import chat_template
from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.methods.base import Method
from upweight.models.processor import ImageReader, image_reader
from upweight.user_modules import load_function, local_file, source_of

OTHER_MEDIA = ("videos", "video", "audios", "audio")


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
    _warn_of_split_marks("datasets.type", entry.type, tokenizer)
    if template.source is not None:
        _warn_of_split_marks("chat_template", entry.chat_template or data.chat_template, tokenizer)
    reader = MessageReader(entry, data.default_system_message)
    sees, function = method.teacher_sees, None
    if sees is not None and "{" not in sees:
        function = load_function(sees, folder, "distill.privileged_prompt")
    tokens = TextTokens(tokenizer, data.eot_tokens)
    images = row_images(data, entry, tokenizer, folder)
    setup = Setup(data, entry, method, reader, template, tokens, classes, function, images)
    if any(row is entry for row in data.test_datasets):  # a transform sees its entry as `cfg.datasets[dataset_idx]`
        cfg = ConfigView({**cfg, "datasets": cfg.get("test_datasets")})
    chosen = RowFilter(load_function(entry.filter, folder, "datasets.filter"), entry.filter) if entry.filter else None
    return Encoder(setup, _transform(setup, entry_index, cfg, folder), chosen)


def _warn_of_split_marks(key: str, name: object, tokenizer: Any) -> None:
    """Warn where a format or template writes marks of turns that are no tokens of the model."""
    family = family_of(name)
    missing = FAMILIES[family].missing_from(tokenizer) if family else []
    if missing:
        marks = " and ".join(missing)
        remedy = "leave it out to train with the model's own template"
        if key == "datasets.type":
            remedy = "`as_messages: true` without it, or 'type: chat_template', applies the model's own template"
        warn_once(
            f"{key}: '{name}' writes {marks}, which are no tokens of this model: they are split like other text. "
            f"{remedy[0].upper()}{remedy[1:]}; `tokens: {missing}` adds them"
        )


def row_images(data: DataSection, entry: DatasetSpec, tokenizer: Any, folder: Path) -> RowImages | None:
    """Return what reads the images of an entry's rows; None for a text model."""
    reader = image_reader(tokenizer)
    if reader is None:
        return None
    source = Path(entry.path or "").expanduser()
    beside = source if source.is_dir() else source.parent
    folders = [beside, folder / beside, folder, Path()]
    # Axolotl puts the images of a column after the text of the first user message, TRL before it.
    prepared = Path(data.prepared_path).expanduser()
    return RowImages(reader, folders, prepared, data.image_hosts, before_text=entry.type is None)


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
    try:
        function = load_function(name, folder, "datasets.type")
    except UserError as error:
        if file:
            raise
        raise UserError(f"{error} Formats for {setup.method.name}: {', '.join(formats)}.") from error
    return Transform(function, name, cfg, index, setup.tokens.tokenizer)


def _read_marked(plain: Format, setup: Setup, row: Row) -> list[Example]:
    """Read a row by a format once its words are labels or name the better answer; nothing where it is left out."""
    read = marked(setup.form, row)
    return [] if read is None else plain(setup, read)


def _read_listed(plain: Format, setup: Setup, row: Row) -> list[Example]:
    """Read a row by a format once its texts that hold messages are messages."""
    return plain(setup, with_messages(setup.form, row))


class Encoder:
    """Turns the rows of one dataset entry into records."""

    def __init__(self, setup: Setup, transform: Transform | None, row_filter: RowFilter | None = None) -> None:
        self.setup, self.transform, self.filter = setup, transform, row_filter
        self.read = format_of(setup.method.formats(), None if transform else setup.entry.type)
        if setup.entry.as_messages:
            self.read = partial(read_as_messages, format_of(setup.method.formats(), None))
        if setup.form.has_marks:
            self.read = partial(_read_marked, self.read)
        self.read = partial(_read_listed, self.read)
        functions = [function.source_text for function in (transform, row_filter) if function]
        functions += [source_of(setup.teacher_prompt)] if setup.teacher_prompt else []
        self.source_text = "".join([setup.template.source or "", *functions])

    def __call__(self, row: Mapping[str, Any]) -> list[Record]:
        """Return the records of a row, none if a filter or a transform drops it; a bad row raises a RowError."""
        return self.encode_many([row])[0]

    def encode_many(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Record]]:
        """Return the records of each row; the first bad row raises a RowError."""
        examples: list[list[Example]] = []
        images: list[list[Loaded]] = []  # of each example
        for row in rows:
            if not isinstance(row, Mapping):
                raise RowError("row", f"a mapping of columns, got {type(row).__name__}")
            if self.filter and not self.filter(row):
                examples.append([])
                continue
            read_rows = self.transform(row) if self.transform else [row]
            of_row: list[Example] = []
            for read_row in read_rows:
                content, loaded = self._read_images(read_row)
                read = self.read(self.setup, Row(content))
                images += [loaded] * len(read)
                of_row += read
            examples.append(of_row)
        texts = [[example.texts(self.setup) for example in row] for row in examples]
        of_each = [several for row in texts for several in row]
        parts = [expanded(text, some) for several, some in zip(of_each, images, strict=True) for text in several]
        ids = iter(self.setup.tokens.ids(parts))
        records, images_left = [], iter(images)
        for row_examples, row_texts in zip(examples, texts, strict=True):
            row_records: list[Record] = []
            for example, several in zip(row_examples, row_texts, strict=True):
                made = records_of(example, self.setup, list(islice(ids, len(several))))
                row_records += self._with_images(made, several, next(images_left))
            records.append(row_records)
        return records

    def _read_images(self, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Loaded]]:
        """Return a row with marks in place of its images, and the images; a text model's row as it is."""
        if self.setup.images is None:
            return row, []
        content, loaded = self.setup.images(row)
        _warn_of_unread_columns(content)
        if not loaded and self.setup.images.reader.placeholder != GENERIC:
            _warn_of_generic_placeholders(content)
        return content, loaded

    def _with_images(self, records: list[Record], texts: Sequence[str], images: list[Loaded]) -> list[Record]:
        """Return the records of an example with references to its images."""
        if self.setup.images is None:
            return records
        if not images:
            for record in records:
                _refuse_image_tokens(record, self.setup.images.reader)
            return records
        method = self.setup.method
        if method.evaluates_loss or method.needs_teacher:
            raise UserError(f"datasets: rows have images, which {method.name} does not train on yet; remove them.")
        return [with_images(record, texts, images, self.setup.images.reader.placeholder) for record in records]


def _refuse_image_tokens(record: Record, reader: ImageReader) -> None:
    """Raise a RowError for the model's token for images in a record without images: it would stand for nothing."""
    names = ("prompt_ids", "input_ids", *COMPLETIONS)
    turns = [record.columns.get(name) or () for name in names] + record.columns.get("truth_ids", [])
    if any(reader.token_id in turn for turn in turns):
        raise RowError("images", missing_images(reader.placeholder))


def _warn_of_unread_columns(row: Mapping[str, Any]) -> None:
    """Warn of columns that hold other media, or images under a name from which none are read."""
    for name, value in row.items():
        if name in OTHER_MEDIA and value:
            warn_once(f"column '{name}': only images are read; rows are trained on without what it holds")
        if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:  # as `datasets` stores images
            warn_once(f"column '{name}' looks like images and is not read; images are read from {' or '.join(COLUMNS)}")


def _warn_of_generic_placeholders(row: Mapping[str, Any]) -> None:
    """Warn of texts with `<image>` in a row without images, for a model whose token for images is another."""
    for name, value in row.items():
        texts = texts_of(value) if is_conversation(value) else [value] if isinstance(value, str) else []
        if any(GENERIC in text for text in texts):
            warn_once(
                f"texts in '{name}' have {GENERIC} in rows without images: it is trained on as text. If it stands for "
                f"an image, put that in the column {' or '.join(COLUMNS)}"
            )
