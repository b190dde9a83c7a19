"""Raw rows into prepared records: format, then tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upweight.config.data import DataSection, DatasetRow, UserFormat
from upweight.config.explain import did_you_mean
from upweight.config.view import ConfigView
from upweight.data.examples import Example, Format, Labelled, Pair, Prompt, Setup, Steps, Text, Tokens
from upweight.data.formats import FORMATS, UNTYPED, USER_DEFINED, kind_of
from upweight.data.formats.ebft import continuous
from upweight.data.messages import MessageReader
from upweight.data.rows import Record, Row, RowError, check_all_text
from upweight.data.templates import chat_template
from upweight.data.tokens import TextTokens
from upweight.data.transforms import Transform, load_function, local_file
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.methods.base import Method

__all__ = ["Encoder", "Record", "RowError", "build_encoder"]

SERVES = {
    "pairs": "preference pairs (dpo, ipo, simpo, orpo, reward models)",
    "labelled": "kto",
    "steps": "process reward models",
    "text": "supervised fine-tuning",
    "prompts": "grpo and gdpo",
    "ebft": "ebft",
}


def build_encoder(
    data: DataSection,
    method: Method,
    entry: DatasetRow,
    entry_index: int,
    tokenizer: Any,
    cfg: ConfigView,
    folder: Path,
) -> "Encoder":
    """What turns the rows of one entry of `datasets` (or `test_datasets`) into records."""
    template = chat_template(data, entry, tokenizer, folder)
    reader = MessageReader(entry, data.default_system_message)
    setup = Setup(data, entry, method, reader, template)
    transform = _transform(setup, entry_index, tokenizer, cfg, folder)
    read = UNTYPED[kind_of(method)](setup) if transform else _built_in(setup)
    return Encoder(setup, read, transform, tokenizer)


def _built_in(setup: Setup) -> Format:
    kind, name = kind_of(setup.method), setup.entry.type
    if isinstance(name, UserFormat):
        if kind not in USER_DEFINED:
            raise UserError(f"datasets.type: a mapping of columns does not serve {SERVES[kind]}. Name a format.")
        return USER_DEFINED[kind](setup)
    return UNTYPED[kind](setup) if name is None else FORMATS[kind][name](setup)


def _transform(setup: Setup, index: int, tokenizer: Any, cfg: ConfigView, folder: Path) -> Transform | None:
    """The user's transform, where the type is none of ours."""
    kind, name = kind_of(setup.method), setup.entry.type
    if not isinstance(name, str):
        return None
    if name in FORMATS[kind]:
        if "." in name and (file := local_file(name, folder)):
            warn_once(f"datasets.type: '{name}' is a built-in format; {file} is not used. Rename the file to use it.")
        return None
    others = [SERVES[other] for other, formats in FORMATS.items() if name in formats]
    if others:
        raise UserError(f"datasets.type: '{name}' is for {' and '.join(others)}, not for {setup.method.name}.")
    if "." not in name or (name.split(".")[0] in _families() and not local_file(name, folder)):
        raise UserError(f"datasets.type: there is no format '{name}'.{did_you_mean(name, FORMATS[kind])}")
    function = load_function(name, folder, "datasets.type")
    return Transform(function, name, _seen_from(setup, index, cfg), index, tokenizer)


def _families() -> set[str]:
    return {name.split(".")[0] for formats in FORMATS.values() for name in formats}


def _seen_from(setup: Setup, index: int, cfg: ConfigView) -> ConfigView:
    """The config with `datasets` the list that holds the entry, so that `cfg.datasets[dataset_idx]` is the entry."""
    held = [row is setup.entry for row in setup.data.test_datasets]
    if any(held) and held.index(True) == index and "test_datasets" in cfg:
        return ConfigView({**cfg, "datasets": cfg["test_datasets"]})
    return cfg


class Encoder:
    """Rows of one dataset into records."""

    def __init__(self, setup: Setup, read: Format, transform: Transform | None, tokenizer: Any) -> None:
        self.setup = setup
        self.read = read
        self.transform = transform
        self.tokens = TextTokens(tokenizer, setup.data.eot_tokens)
        own_template = getattr(tokenizer, "chat_template", None)
        self.source_text = f"{setup.template.source or own_template}\n{transform.source_text if transform else ''}"

    def __call__(self, row: Mapping[str, Any]) -> list[Record]:
        """The records that a row becomes; none where a transform drops it. A bad row is a RowError."""
        if not isinstance(row, Mapping):
            raise RowError("row", f"a mapping of columns, found {type(row).__name__}")
        rows: list[Row] = self.transform(row) if self.transform else [row]
        return [self._record(example) for one in rows for example in self.read(one)]

    def _record(self, example: Example) -> Record:
        match example:
            case Pair():
                return self._pair(example)
            case Labelled():
                return self._labelled(example)
            case Steps():
                return self._steps(example)
            case Prompt():
                return self._prompt(example)
            case Text() | Tokens():
                return self._text(example)

    def _pair(self, pair: Pair) -> Record:
        prompt, (chosen, rejected) = self.tokens.split(pair.prompt, {"chosen": pair.chosen, "rejected": pair.rejected})
        text = {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
        columns: dict[str, Any] = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        if pair.margin is not None:
            text, columns = {**text, "margin": pair.margin}, {**columns, "margin": pair.margin}
        return Record(text, columns, self.tokens.pinned(prompt))

    def _labelled(self, example: Labelled) -> Record:
        prompt, (completion,) = self.tokens.split(example.prompt, {"completion": example.completion})
        text = {"prompt": example.prompt, "completion": example.completion, "label": example.label}
        columns = {"prompt_ids": prompt, "completion_ids": completion, "label": example.label}
        return Record(text, columns, self.tokens.pinned(prompt))

    def _steps(self, example: Steps) -> Record:
        entry = self.setup.entry
        separator = "\n" if entry.step_separator is None else entry.step_separator
        prompt, ends, *steps = self.tokens.ids([example.prompt, separator, *example.completions])
        ids, labels = [], []
        for number, (step, label) in enumerate(zip(steps, example.labels, strict=True)):
            ids += [*step, *ends]
            counts = not entry.train_on_last_step_only or number == len(steps) - 1
            size = len(step) + len(ends)
            if not size:
                raise RowError(f"completions[{number}]", "text that makes at least one token")
            labels += [-100] * (size - 1) + [label if counts else -100]
        limit = entry.max_completion_length
        if self.tokens.bos is not None and prompt[:1] != [self.tokens.bos]:
            prompt = [self.tokens.bos, *prompt]
        text = {"prompt": example.prompt, "completions": example.completions, "labels": example.labels}
        columns = {"ids": prompt + ids[:limit], "labels": [-100] * len(prompt) + labels[:limit]}
        return Record(text, columns, self.tokens.pinned(prompt))

    def _prompt(self, example: Prompt) -> Record:
        check_all_text(example.columns, "row")
        if self.setup.method.name == "ebft" and getattr(self.setup.method, "mode", "") == "strided":
            return self._text(continuous(example.text, example.columns["ground_truth"]))
        ids = self.tokens.begun(self.tokens.ids([example.text])[0])
        if not ids:
            raise RowError("prompt", "text that makes at least one token")
        columns = {**example.columns, "prompt": example.prompt, "prompt_ids": ids}
        return Record({**example.columns, "prompt": example.text}, columns, self.tokens.pinned(ids))

    def _text(self, example: Text | Tokens) -> Record:
        if self.setup.method.data == "prompts" and getattr(self.setup.method, "mode", "") != "strided":
            raise UserError(
                f"datasets.type: '{self.setup.entry.type}' makes documents, which 'ebft.mode: strided' reads."
            )
        if isinstance(example, Tokens):
            ids, scored, text = example.ids, list(example.scored), {}
        else:
            ids, scored = self._scored(example)
            text = example.shown
        scored[0] = False  # nothing comes before the first token to predict it from
        if not any(scored):
            raise RowError("row", "at least two tokens, of which one is trained on")
        columns: dict[str, Any] = {"ids": ids, "scored": scored}
        if self.setup.method.data == "prompts":
            columns["prompt_length"] = scored.index(True)
        return Record(text, columns, self.tokens.pinned(ids))

    def _scored(self, example: Text) -> tuple[list[int], list[bool]]:
        """Ids of a text, and which of them are trained on."""
        places = sorted({place for span in example.spans for place in
                         (span.start, span.end, *(end for hole in span.holes for end in hole))})  # fmt: skip
        ids, counts = self.tokens.boundaries(example.text, places)
        if not ids:
            raise RowError("row", "text that makes at least one token")
        at = dict(zip(places, counts, strict=True))
        scored = [False] * len(ids)
        for span in example.spans:
            scored[at[span.start] : at[span.end]] = [span.train] * (at[span.end] - at[span.start])
            for start, end in span.holes:
                scored[at[start] : at[end]] = [False] * (at[end] - at[start])
        self._score_ends(ids, scored, [at[span.end] - 1 for span in example.spans])
        whole = self.tokens.begun(ids)
        scored = [False] * (len(whole) - len(ids)) + scored[max(0, len(ids) - len(whole)) :]
        complete = self.tokens.ended(whole) if example.add_end else whole
        policy = self.setup.entry.train_on_eos or "turn"
        return complete, scored + [scored[-1] and policy != "none"] * (len(complete) - len(whole))

    def _score_ends(self, ids: list[int], scored: list[bool], closing: list[int]) -> None:
        """Whether the tokens that end turns are trained on, as `train_on_eos` and `train_on_eot` say."""
        on_eos = self.setup.entry.train_on_eos or "turn"
        on_eot = self.setup.entry.train_on_eot or on_eos
        if on_eos == on_eot == "turn":
            return
        ends = {number for number, token in enumerate(ids) if token in self.tokens.ends}
        for number in ends:
            policy = on_eos if ids[number] == self.tokens.eos else on_eot
            if policy == "all":
                scored[number] = True
            elif number in closing:
                scored[number] = policy == "turn" or (policy == "last" and number == max(closing))
