"""Examples that formats build from rows; `texts` list what needs token ids, `record` takes the ids of all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from upweight.config.sections.data import DataSection, DatasetSpec, UserFormat
from upweight.data.images.row_images import RowImages
from upweight.data.raw_row import NO_TEXT, Record, Row, RowError, check_all_text, common_length
from upweight.data.tokenize.messages import Message, MessageReader
from upweight.data.tokenize.templates import ChatTemplate, Span
from upweight.data.tokenize.tokens import TextTokens
from upweight.errors import UserError
from upweight.methods.base import Method
from upweight.types import IGNORED

MOST_OVERLAP = 256  # tokens that neighbouring windows of a text share
ALPACA = UserFormat(  # also the column names where `type` is no mapping
    format="{system}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    no_input_format="{system}\n\n### Instruction:\n{instruction}\n\n### Response:\n",
)

Ids = list[list[int]]


@dataclass(frozen=True)
class Setup:
    """Everything that a format reads besides the row."""

    data: DataSection
    entry: DatasetSpec
    method: Method
    reader: MessageReader
    template: ChatTemplate
    tokens: TextTokens
    classes: int | None = None  # outputs of the score head, if known
    teacher_prompt: Callable[[dict[str, Any]], Any] | None = None  # the user's function of what a teacher sees
    images: RowImages | None = None  # None: rows are read as texts

    @property
    def form(self) -> UserFormat:
        """The column names and text templates of the config if `type` is a mapping, else the default ones."""
        return self.entry.type if isinstance(self.entry.type, UserFormat) else ALPACA

    def messages(self, row: Row, key: str) -> list[Message]:
        return self.reader.messages(row.value(key), key)


@dataclass(frozen=True)
class Completions:
    """A prompt, its completions by name (chosen and rejected, or one), and further columns (a margin or a label)."""

    prompt: str
    completions: dict[str, str]
    columns: dict[str, Any] = field(default_factory=dict)

    def texts(self, setup: Setup) -> list[str]:
        for key, completion in self.completions.items():
            if not completion:
                raise RowError(key, NO_TEXT)
        return [self.prompt, *(self.prompt + completion for completion in self.completions.values())]

    def record(self, setup: Setup, ids: Ids) -> Record:
        alone, *sequences = ids
        # A token that spans the prompt and a completion belongs to the completion.
        shared = min(common_length(alone, sequence) for sequence in sequences)
        prompt = setup.tokens.with_bos(alone[:shared])
        if not prompt:
            raise RowError("prompt", "text of at least one token before the completion")
        columns: dict[str, Any] = {"prompt_ids": prompt}
        for key, sequence in zip(self.completions, sequences, strict=True):
            if len(sequence) <= shared:
                raise RowError(key, "text of at least one token")
            columns[f"{key}_ids"] = setup.tokens.with_eos(sequence[shared:])
        text = {"prompt": self.prompt, **self.completions, **self.columns}
        return Record(text, columns | self.columns, setup.tokens.pinned(prompt))


@dataclass(frozen=True)
class Steps:
    """A prompt, the steps of a completion, and the class of each step."""

    prompt: str
    completions: list[str]
    labels: list[int]

    def texts(self, setup: Setup) -> list[str]:
        separator = setup.entry.step_separator
        return [self.prompt, "\n" if separator is None else separator, *self.completions]

    def record(self, setup: Setup, ids: Ids) -> Record:
        prompt, separator, *steps = ids
        answer, labels = [], []
        for number, (step, label) in enumerate(zip(steps, self.labels, strict=True)):
            if not step:
                raise RowError(f"completions[{number}]", "text of at least one token")
            counts = not setup.entry.train_on_last_step_only or number == len(steps) - 1
            answer += [*step, *separator]
            labels += [IGNORED] * (len(step) + len(separator) - 1) + [label if counts else IGNORED]
        limit, bos = setup.entry.max_completion_length, setup.tokens.bos
        prompt = setup.tokens.with_bos(prompt)
        if bos is not None and prompt[:1] != [bos]:
            prompt = [bos, *prompt]
        text = {"prompt": self.prompt, "completions": self.completions, "labels": self.labels}
        return Record(text, {"input_ids": prompt + answer[:limit], "labels": [IGNORED] * len(prompt) + labels[:limit]})


@dataclass(frozen=True)
class Prompt:
    """A prompt as the row holds it, its rendered text, the columns for rewards, and the true continuation for EBFT."""

    prompt: str | list[dict[str, Any]]
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    # The true completion as the template writes it; then, in turn, the text up to the next completion, and that one.
    truth: tuple[str, ...] = ()
    seen_by_teacher: str | None = None  # the prompt that a teacher sees in place of this one

    def texts(self, setup: Setup) -> list[str]:
        check_all_text(self.columns, "row")
        return [self.text, *self.truth, *([] if self.seen_by_teacher is None else [self.seen_by_teacher])]

    def record(self, setup: Setup, ids: Ids) -> Record:
        prompt = setup.tokens.with_bos(ids[0])
        if not prompt:
            raise RowError("prompt", "text of at least one token")
        columns = {**self.columns, "prompt": self.prompt, "prompt_ids": prompt}
        if self.seen_by_teacher is not None:
            *ids, seen = ids
            columns["teacher_prompt_ids"] = setup.tokens.with_bos(seen)
        if self.truth:
            truth = enumerate(ids[1:])
            columns["truth_ids"] = [turn if number % 2 else setup.tokens.with_eos(turn) for number, turn in truth]
        return Record({**self.columns, "prompt": self.text}, columns, setup.tokens.pinned(prompt))


@dataclass(frozen=True)
class Text:
    """One text, the ranges of it that are trained on, and what is shown of it if not the text."""

    text: str
    spans: list[Span]
    shown: dict[str, Any] | None = None

    @staticmethod
    def joined(prompt: str, completion: str, *, with_prompt: bool = False) -> "Text":
        """Join a prompt and its completion, which is trained on, and with `with_prompt` the prompt too."""
        text = prompt + completion
        span = Span(0 if with_prompt else len(prompt), len(text))
        return Text(text, [span], {"prompt": prompt, "completion": completion})

    @staticmethod
    def all_trained(text: str) -> "Text":
        return Text(text, [Span(0, len(text))])

    @property
    def offsets(self) -> list[int]:
        """The positions in the text where a trained range begins or ends."""
        untrained = {offset for span in self.spans for part in span.untrained for offset in part}
        return sorted(untrained | {offset for span in self.spans for offset in (span.start, span.end)})

    def texts(self, setup: Setup) -> list[str]:
        return [self.text, *(self.text[:offset] for offset in self.offsets)]

    def record(self, setup: Setup, ids: Ids) -> Record:
        """Score the tokens that lie wholly inside the spans."""
        whole, *before = ids
        if not whole:
            raise RowError("row", "text of at least one token")
        at = {offset: common_length(whole, part) for offset, part in zip(self.offsets, before, strict=True)}
        loss_mask = [False] * len(whole)
        for span in self.spans:
            loss_mask[at[span.start] : at[span.end]] = [True] * (at[span.end] - at[span.start])
            for start, end in span.untrained:
                loss_mask[at[start] : at[end]] = [False] * (at[end] - at[start])
        _mask_ends(setup, whole, loss_mask, [at[span.end] - 1 for span in self.spans])
        with_bos = setup.tokens.with_bos(whole)
        added = len(with_bos) - len(whole)
        loss_mask = [False] * added + loss_mask[max(0, -added) :]
        # A document of EBFT may continue after its end: only completions and single texts get an end token.
        ended = with_bos if setup.method.data == "prompts" else setup.tokens.with_eos(with_bos)
        loss_mask += [loss_mask[-1] and setup.entry.train_on_eos != "none"] * (len(ended) - len(with_bos))
        return _text_record(setup, ended, loss_mask, self.shown or {"text": self.text})


class Segment(NamedTuple):
    """A stretch of a text, whether it is trained on, and how many end tokens follow it."""

    text: str
    trained: bool
    ends: int = 0


@dataclass(frozen=True)
class Segments:
    """Stretches of one text, each tokenized alone."""

    parts: tuple[Segment, ...]
    bos: bool = True

    def texts(self, setup: Setup) -> list[str]:
        return [part.text for part in self.parts]

    def record(self, setup: Setup, ids: Ids) -> Record:
        whole: list[int] = []
        loss_mask: list[bool] = []
        for part, tokens in zip(self.parts, ids, strict=True):
            ended = setup.tokens.with_eos(tokens) if part.ends else tokens
            if setup.tokens.eos is not None:
                ended = ended + [setup.tokens.eos] * (part.ends - 1)
            on_ends = part.trained and setup.entry.train_on_eos != "none"
            whole += ended
            loss_mask += [part.trained] * len(tokens) + [on_ends] * (len(ended) - len(tokens))
        if self.bos:
            with_bos = setup.tokens.with_bos(whole)
            added = len(with_bos) - len(whole)
            whole, loss_mask = with_bos, [False] * added + loss_mask[max(0, -added) :]
        if not whole:
            raise RowError("row", "text of at least one token")
        first = next((number for number, part in enumerate(self.parts) if part.trained), 0)
        texts = ["".join(part.text for part in parts) for parts in (self.parts[:first], self.parts[first:])]
        return _text_record(setup, whole, loss_mask, dict(zip(("prompt", "completion"), texts, strict=True)))


@dataclass(frozen=True)
class Pieces:
    """A text that becomes a record for each piece of `sequence_len`; windows overlap and have BOS and EOS each."""

    text: str
    windows: bool = False

    def texts(self, setup: Setup) -> list[str]:
        return [self.text]

    def records(self, setup: Setup, ids: Ids) -> list[Record]:
        tokens, size, overlap = setup.tokens, setup.data.sequence_len, 0
        if not ids[0]:
            raise RowError("row", "text of at least one token")
        whole = tokens.with_bos(ids[0])
        pinned = whole[: tokens.pinned(whole)]
        if self.windows:
            size = max(size - 1 - len(pinned), 1)
            overlap = min(MOST_OVERLAP, (setup.data.sequence_len - 1) // 2, size - 1)
            whole = whole[len(pinned) :]
        else:
            whole = tokens.with_eos(whole)
        starts = range(0, max(len(whole) - overlap, 1), size - overlap)
        pieces = [whole[start : start + size] for start in starts]
        if self.windows:
            end = [] if tokens.eos is None else [tokens.eos]
            pieces = [[*pinned, *piece, *end] for piece in pieces]
        # Nothing precedes a token that is alone, to predict it from.
        kept = [piece for piece in pieces if len(piece) > 1] or pieces[:1]
        shown = {"text": self.text} if len(kept) == 1 else {}
        return [_text_record(setup, piece, [True] * len(piece), shown) for piece in kept]


@dataclass(frozen=True)
class Tokens:
    """A row that was tokenized before: the columns of its record."""

    columns: dict[str, Any]

    def texts(self, setup: Setup) -> list[str]:
        return []

    def record(self, setup: Setup, ids: Ids) -> Record:
        if "loss_mask" in self.columns:
            return _text_record(setup, self.columns["input_ids"], self.columns["loss_mask"], {})
        return Record({}, self.columns, setup.tokens.pinned(self.columns.get("prompt_ids", [])))


@dataclass(frozen=True)
class WithColumns:
    """An example with further columns for its records."""

    example: Text | Segments | Pieces | Tokens
    columns: dict[str, Any]
    by_token: dict[str, list[list[Any]]] = field(default_factory=dict)  # the last entry is that of the last token

    def texts(self, setup: Setup) -> list[str]:
        return self.example.texts(setup)


Example = Completions | Steps | Prompt | Text | Segments | Pieces | Tokens | WithColumns
Format = Callable[[Setup, Row], list[Example]]


def _by_token(example: WithColumns, record: Record) -> dict[str, list[list[Any]]]:
    """Return the lists of an example's tokens, with empty ones for the tokens before them."""
    tokens = len(record.columns["input_ids"])
    for name, lists in example.by_token.items():
        if len(lists) > tokens:
            raise RowError(name, f"at most a list for each of the {tokens} tokens, got {len(lists)}")
    return {name: [[]] * (tokens - len(lists)) + lists for name, lists in example.by_token.items()}


def records_of(example: Example, setup: Setup, ids: Ids) -> list[Record]:
    """Return the records that an example becomes, given the ids of its texts."""
    if isinstance(example, WithColumns):
        records = records_of(example.example, setup, ids)
        return [replace(one, columns=one.columns | example.columns | _by_token(example, one)) for one in records]
    return example.records(setup, ids) if isinstance(example, Pieces) else [example.record(setup, ids)]


def _mask_ends(setup: Setup, ids: list[int], loss_mask: list[bool], closing: list[int]) -> None:
    """Set in `loss_mask` whether the tokens that end turns are trained on, by `train_on_eos` and `train_on_eot`."""
    tokens, on_eos = setup.tokens, setup.entry.train_on_eos or "turn"
    on_eot = setup.entry.train_on_eot or on_eos
    if on_eos == on_eot == "turn":
        return
    ends = tokens.turn_ends | {tokens.eos} | ({ids[number] for number in closing} & tokens.ends)
    for number, token in enumerate(ids):
        if token in ends:
            policy = on_eos if token == tokens.eos else on_eot
            if policy == "all":
                loss_mask[number] = True
            elif number in closing:
                loss_mask[number] = policy == "turn" or (policy == "last" and number == max(closing))


def _text_record(setup: Setup, ids: list[int], loss_mask: list[bool], shown: dict[str, Any]) -> Record:
    is_document = setup.method.data == "prompts"
    if is_document and not setup.method.strided:
        source = f"'{setup.entry.type}' makes" if setup.entry.type else "these rows are"
        raise UserError(f"datasets.type: {source} documents, which only 'ebft.mode: strided' reads.")
    loss_mask[0] = False  # no token precedes the first one to predict it from
    if not any(loss_mask):
        raise RowError("row", "at least two tokens, of which one is trained on")
    extra = {"prompt_length": loss_mask.index(True)} if is_document else {}
    return Record(shown, {"input_ids": ids, "loss_mask": loss_mask, **extra})
