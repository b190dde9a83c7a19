"""What the tokens of a tokenizer stand for: bytes of text, or marks such as the end of a turn."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from tokenizers import Tokenizer

from upweight.errors import UserError

SPACE, REPLACED = "▁", "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
ANSWER = "A1b2C3"  # which a chat template is asked to render, to see what it writes after it
KEPT_TEXTS = 512  # whose tokens are remembered: completions of one prompt share it


def _byte_of_character() -> dict[str, int]:
    """Return the bytes that the characters of byte-level vocabularies stand for."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF = _byte_of_character()


@dataclass(frozen=True)
class Roles:
    """The ids of tokens by what they are for; None: there is none."""

    turn_end: int | None
    text_end: int | None
    begin: int | None
    padding: int | None


class TokenBytes:
    """The bytes of each token of a vocabulary, the marks in it, and how it splits text."""

    def __init__(self, tokenizer: Any, where: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            problem = f"{where} has a tokenizer without a tokenizer.json, whose tokens are not known as bytes"
            raise UserError(f"distill.align: {problem}. Name a model that has one.")
        self.tokenizer, described = tokenizer, json.loads(backend.to_str())
        read = _reader(described, where)
        added = tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.marks: dict[int, str] = {}
        self.bytes_of: dict[int, bytes] = {}
        self.fallback: set[int] = set()  # tokens for bytes of characters that have none
        for token, number in tokenizer.get_vocab().items():
            if number in special:
                self.marks[number] = token
            else:
                self.bytes_of[number] = read(token, number in added)
                if read is _spaced and BYTE.fullmatch(token):
                    self.fallback.add(number)
        # What a text begins with; and the same tokenizer, which adds no space to what continues one.
        self._begins, self._continues = (_plain(one) for one in (described, _without_prefix(described)))
        self.ids = lru_cache(KEPT_TEXTS)(self._ids)

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max([*self.marks, *self.bytes_of]) + 1

    @cached_property
    def length_V(self) -> NDArray[np.int64]:
        """The number of bytes of each id; -1 for marks and ids without a token."""
        length_V = np.full(self.size, -1, np.int64)
        for number, content in self.bytes_of.items():
            length_V[number] = len(content)
        return length_V

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The token that stands for some bytes: where several do, the one that is not there for single bytes only."""
        ranked = sorted(self.bytes_of.items(), key=lambda item: (item[0] not in self.fallback, -item[0]))
        return {content: number for number, content in ranked if content}

    @cached_property
    def prefixes(self) -> bool:
        """Whether the tokens of a text begin with a space that the text does not have."""
        return self.text(self._begins.encode("a", add_special_tokens=False).ids) == b" a"

    @cached_property
    def begins(self) -> bool:
        """Whether what it encodes begins with its token for the beginning of a text."""
        ids = self.tokenizer("a")["input_ids"]
        return self.roles.begin is not None and bool(ids) and ids[0] == self.roles.begin

    @cached_property
    def roles(self) -> Roles:
        """Its marks by their roles."""
        one = self.tokenizer
        return Roles(self._turn_end(), one.eos_token_id, one.bos_token_id, one.pad_token_id)

    def text(self, ids: Any) -> bytes:
        """Return the bytes of tokens, none of them marks."""
        return b"".join(self.bytes_of[int(number)] for number in ids)

    def _ids(self, text: str, *, first: bool) -> NDArray[np.int64]:
        """Return the tokens of a text, which is read as such, whatever marks it names."""
        backend = self._begins if first else self._continues
        return np.array(backend.encode(text, add_special_tokens=False).ids, np.int64)

    def _turn_end(self) -> int | None:
        """Return the mark that the chat template writes after an answer; without one, the end of texts."""
        ends = self.tokenizer.eos_token_id
        if not getattr(self.tokenizer, "chat_template", None):
            return ends
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ANSWER}]
        try:
            after = self.tokenizer.apply_chat_template(turns, tokenize=False).rpartition(ANSWER)[2].lstrip()
        except (TemplateError, ValueError):
            return ends
        # the longest, where one mark is the beginning of another
        longest = max(
            (mark for mark in self.marks.items() if after.startswith(mark[1])), key=_mark_length, default=None
        )
        return ends if longest is None else longest[0]


def _mark_length(mark: tuple[int, str]) -> int:
    return len(mark[1])


def _reader(described: dict[str, Any], where: str) -> Any:
    """Return the function that reads a token, and whether it was added to the vocabulary, as bytes."""
    steps = list(_steps(described.get("decoder")))
    kinds = {step["type"] for step in steps}
    spaced = any(step["type"] == "Replace" and step["pattern"].get("String") == SPACE for step in steps)
    if "ByteLevel" in kinds:
        return _byte_level
    if spaced or "Metaspace" in kinds:
        return _spaced
    problem = f"{where} has a tokenizer that is neither byte-level nor like SentencePiece's"
    raise UserError(f"distill.align: {problem}: what bytes its tokens stand for is not known. Name another model.")


def _byte_level(token: str, added: bool) -> bytes:
    if added or any(character not in BYTE_OF for character in token):
        return token.encode()
    return bytes(BYTE_OF[character] for character in token)


def _spaced(token: str, added: bool) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer, those of sequences one by one."""
    if part is None:
        return
    inner = next((part[name] for name in ("decoders", "normalizers", "pretokenizers") if name in part), None)
    if inner is None:
        yield part
        return
    for one in inner:
        yield from _steps(one)


def _without_prefix(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a tokenizer that adds no space to the beginning of a text."""
    changed = json.loads(json.dumps(described))
    for step in _steps(changed.get("pre_tokenizer")):
        if step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
        elif step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    for step in _steps(changed.get("normalizer")):
        if step["type"] == "Prepend":
            step["prepend"] = ""
    return changed


def _plain(described: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer for which marks are text, and which neither cuts nor pads."""
    backend = Tokenizer.from_str(json.dumps({**described, "truncation": None, "padding": None}))
    backend.encode_special_tokens = True
    return backend
