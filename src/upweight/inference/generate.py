"""Generates text with a language model outside of training."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from upweight.config.sections.data import DataSection, DatasetSpec
from upweight.config.sections.model import ModelSection
from upweight.data.encode import row_images
from upweight.data.examples import Setup
from upweight.data.formats.training_style import style_of
from upweight.data.images.marks import MARKS, expanded, missing_images
from upweight.data.images.row_images import COLUMNS
from upweight.data.raw_row import Row, RowError, checked_text
from upweight.data.tokenize.messages import Conversation, MessageReader
from upweight.data.tokenize.templates import chat_template
from upweight.data.tokenize.tokens import TextTokens
from upweight.engine import Engine
from upweight.errors import UserError
from upweight.inference.score import load_trained
from upweight.log import inform_once, logger, warn_once
from upweight.methods.base import Method
from upweight.models.modules import unwrap_peft
from upweight.models.processor import image_reader
from upweight.models.tokenizer import eos_token_ids
from upweight.sampler.in_process import InProcess
from upweight.types import Completion, ImageRef, Prompts, Sampling

NEW_TOKENS = 512  # default limit, if the model has room for as many


class TextGenerator:
    """Generates completions of prompts; texts become user messages if there is a chat template and `raw` is False."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        data: DataSection | None = None,
        entry: DatasetSpec | None = None,
        folder: Path | None = None,
        system: str | None = None,
        raw: bool = False,
        trained_on: tuple[DatasetSpec, Method] | None = None,
        style: bool = True,
        new_tokens: int | None = None,
    ) -> None:
        """`data`, `entry`: how training formatted text; `folder`: where paths in them begin; `new_tokens`: limit.

        `trained_on`: with `style`, texts are written in the style of this dataset's `type`, where it has one.
        """
        data, entry = data or DataSection(), entry or DatasetSpec()
        self._tokenizer, self._tokens = tokenizer, TextTokens(tokenizer, data.eot_tokens)
        self._template = chat_template(data, entry, tokenizer, folder or Path())
        self._reader = MessageReader(entry, system or data.default_system_message)
        self._images = row_images(data, entry, tokenizer, folder or Path())
        known = bool(self._template.source or tokenizer.chat_template)
        self.raw, self.templated, self._new_tokens = raw, known and not raw, new_tokens
        if system and not self.templated:
            raise UserError("a system text needs a chat template: name one (`chat_template`), and leave --raw out")
        self._style = None
        if trained_on is not None and not raw and self._images is None:
            trained_entry, method = trained_on
            self._style = style_of(Setup(data, trained_entry, method, self._reader, self._template, self._tokens))
        self._writes_style = style and not system and self._style is not None
        if not known and not raw and not self._writes_style:
            logger.info("the tokenizer has no chat template: texts are continued as they are")
        base = unwrap_peft(model)
        self._limit: int | None = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        self._ends = eos_token_ids(base, tokenizer) | self._tokens.turn_ends | self._turn_end()
        engine = Engine(model, images=image_reader(tokenizer))
        self._sampler = InProcess(model, tokenizer, engine=engine, end_ids=self._ends)

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have images."""
        return self._images is not None

    def encode(self, row: Mapping[str, Any], *, raw: bool = False) -> list[int]:
        """Encode the `prompt` of a row, text or messages, as token ids; raise a RowError if it cannot be used.

        With `raw`, the text is continued as it is, also where the generator puts texts into the chat template.
        """
        return self.encode_with_images(row, raw=raw)[0]

    def encode_with_images(
        self, row: Mapping[str, Any], *, raw: bool = False
    ) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Encode the `prompt` of a row with the images of its columns and messages, if the model reads images."""
        prompt, loaded = row.get("prompt"), []
        if isinstance(prompt, str) and not prompt.strip():
            raise RowError("prompt", "text, got an empty one")
        if self._style is not None and self._writes_style and not raw and not isinstance(prompt, list):
            inform_once(f"prompts are written as in training, by {self._style.name}; --no-style turns it off")
            prompt, raw = self._style(Row(row)), True
        if self._images is not None:
            has_column = any(row.get(name) is not None for name in COLUMNS)
            if has_column and self.templated and isinstance(prompt, str):
                row = {**row, "prompt": [{"role": "user", "content": prompt}]}
            row, loaded = self._images(row)
            prompt = row.get("prompt")
        if raw or self.raw or (isinstance(prompt, str) and not self.templated):
            text = checked_text(prompt, "prompt")
        else:
            if self._style is not None:
                warn_once(
                    f"training wrote prompts by {self._style.name}, and here they are put into the chat template, to "
                    "which the model may answer worse; `--prompt` and `--file` write texts as in training"
                )
            messages = self._reader.messages(prompt, "prompt")
            text = self._template.prompt(self._reader.conversation(Row(row), messages))
        refs = tuple(loaded[int(number)][0] for number in MARKS.findall(text)) if loaded else ()
        ids = self._tokens.with_bos(self._tokens.ids([expanded(text, loaded)])[0])
        if self._images is not None and not refs and self._images.reader.token_id in ids:
            raise RowError("prompt", missing_images(self._images.reader.placeholder))
        wanted = self._new_tokens or 1
        if self._limit is not None and len(ids) + wanted > self._limit:
            follow = f"the model has {self._limit} positions, and {wanted} new tokens are to follow"
            raise RowError("prompt", f"at most {self._limit - wanted} tokens ({follow}), got {len(ids)}")
        return ids, refs

    def __call__(
        self,
        prompts: Prompts,
        sampling: Sampling,
        count: int = 1,
        on_text: Callable[[str], None] | None = None,
        *,
        new_tokens: int | None = None,
    ) -> list[list[Completion]]:
        """Return `count` completions of each prompt, of `new_tokens` at most where there is room for as many.

        `on_text` gets the first text live.
        """
        completions: list[list[Completion]] = [[] for _ in prompts]
        most, limit = new_tokens or NEW_TOKENS, self._limit or sys.maxsize
        rooms = [(not new_tokens and self._new_tokens) or min(most, limit - len(ids)) for ids in prompts]
        for room in dict.fromkeys(rooms):
            numbers = [number for number, size in enumerate(rooms) if size == room]
            seed = None if sampling.seed is None else sampling.seed + numbers[0]
            images = tuple(sampling.images[number] for number in numbers) if sampling.images else ()
            drawn = dataclasses.replace(sampling, max_new_tokens=room, seed=seed, images=images)
            listener = _TextStream(self._decode, on_text) if on_text and numbers[0] == 0 else None
            out = self._sampler.generate([prompts[n] for n in numbers], count, drawn, on_tokens=listener)
            for number, group in zip(numbers, out, strict=True):
                completions[number] = [dataclasses.replace(item, text=self._decode(item.ids)) for item in group]
            if listener is not None:
                listener.emit(str(completions[0][0].text))
        return completions

    def _decode(self, ids: list[int]) -> str:
        kept = ids[:-1] if ids and ids[-1] in self._ends else ids
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))

    def _turn_end(self) -> frozenset[int]:
        """Return the token that ends a turn in the chat template, which may differ from the tokenizer's EOS."""
        if not self.templated:
            return frozenset()
        probe = Conversation([{"role": "user", "content": "a"}])
        try:
            _, (answer,) = self._template.split(probe, [[{"role": "assistant", "content": "a"}]])
        except RowError:  # the template needs more messages; then only EOS ends a turn
            return frozenset()
        return frozenset(self._tokens.ids([answer])[0][-1:]) & self._tokens.ends


class _TextStream:
    """Decodes the tokens of the first completion as they arrive and emits whole characters."""

    def __init__(self, text_of: Callable[[list[int]], str], on_text: Callable[[str], None]) -> None:
        self._text_of, self._on_text, self._emitted = text_of, on_text, 0
        self._ids: list[int] = []

    def __call__(self, row: int, ids: list[int]) -> None:
        if row == 0:
            self._ids += ids
            self.emit(self._text_of(self._ids).rstrip("\ufffd"))  # an incomplete character

    def emit(self, text: str) -> None:
        """Pass on the part of a text that has not been emitted yet."""
        if len(text) > self._emitted:
            self._on_text(text[self._emitted :])
            self._emitted = len(text)


def load_text_generator(section: ModelSection, adapter: Path | None = None, **options: Any) -> TextGenerator:
    """Load the language model of a folder or the hub, or an adapter on its base; `options` go to TextGenerator."""
    model, tokenizer, _ = load_trained(section, adapter, scores=False)
    return TextGenerator(model, tokenizer, **options)
