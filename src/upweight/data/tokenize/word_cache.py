"""Token ids word by word: texts repeat their words, so that the ids of each are looked up instead of computed again."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain, product
from typing import Any

MOST_WORDS = 1 << 18  # kept at a time
MOST_IDS = 1 << 20  # of all words that are kept
LONGEST_WORD = 64  # characters; texts without spaces are single words, which do not come again
MOST_CHECKED = 64  # first texts that are compared with what the tokenizer says
MOST_ADDED = 2000  # tokens that are looked for in texts
PLAIN: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
NORMALIZERS = (None, "NFC")  # which do nothing across a space
# Characters of all classes that patterns of pre-tokenizers tell apart, to try what they do around a space.
LEFT = [*"aZ742!'s/_.)", "é", "漢", "あ", "д", "ß", "\u0301", "🙂", "ー", "²", "\u2019"]
RIGHT = [*LEFT, "\n", "\t", "\r\n", " a", " !", "\u00a0", "\u3000", "'s", ""]
SLOW_CUT = re.compile(r"(?<=\S)(?= )")
SPACE_BEFORE_SPACE = re.compile(r"\s ")


class WordIds:
    """Looks up the ids of words; only for tokenizers that split texts before every space that follows a word."""

    def __init__(self, tokenizer: Any, added: set[str]) -> None:
        self.tokenizer, self.added = tokenizer, added
        longest_first = sorted(added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._words: dict[str, tuple[int, ...]] = {}  # which garbage collections pass over, unlike lists
        self._size = 0  # ids of all of them
        self._unchecked = MOST_CHECKED

    @staticmethod
    def of(tokenizer: Any) -> "WordIds | None":
        """Return the cache for a tokenizer, or None if its words cannot be told apart by spaces."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str") or getattr(backend, "encode_special_tokens", False):
            return None
        parts = json.loads(backend.to_str())
        model, added, normalizer = parts["model"], parts["added_tokens"], parts["normalizer"]
        kind = normalizer["type"] if normalizer else None
        plain = model.get("type") == "BPE" and not model.get("dropout") and kind in NORMALIZERS
        stripped = ("lstrip", "rstrip", "single_word", *(["normalized"] if normalizer else []))
        if not plain or len(added) > MOST_ADDED or any(token[flag] for token in added for flag in stripped):
            return None
        if not _is_byte_level(parts["pre_tokenizer"]) or not _splits_before_spaces(backend.pre_tokenizer):
            return None
        return WordIds(tokenizer, {token["content"] for token in added})

    def ids(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of each text without added special tokens; None if the tokenizer says otherwise."""
        split = [self._split(text) for text in texts]
        missing = [*({*chain.from_iterable(split)} - self._words.keys())]
        encoded = self._encode(missing)
        self._words.update(zip(missing, encoded, strict=True))
        look_up = self._words.__getitem__
        ids = [[*chain.from_iterable(map(look_up, words))] for words in split]
        self._forget(missing, encoded)
        if self._unchecked > 0:
            checked = list(texts[: self._unchecked])
            self._unchecked -= len(checked)
            if self.tokenizer(checked, **PLAIN)["input_ids"] != ids[: len(checked)]:
                return None
        return ids

    def _forget(self, words: list[str], encoded: list[tuple[int, ...]]) -> None:
        """Drop those of the newest words that are too long to keep, and all words when there are too many."""
        self._size += sum(map(len, encoded))
        for word, ids in zip(words, encoded, strict=True):
            if len(word) > LONGEST_WORD:
                del self._words[word]
                self._size -= len(ids)
        if len(self._words) > MOST_WORDS or self._size > MOST_IDS:
            self._words, self._size = {}, 0

    def _encode(self, words: list[str]) -> list[tuple[int, ...]]:
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is None and backend.padding is None:
            return [tuple(encoding.ids) for encoding in backend.encode_batch_fast(words, add_special_tokens=False)]
        return [tuple(ids) for ids in self.tokenizer(words, **PLAIN)["input_ids"]] if words else []

    def _split(self, text: str) -> list[str]:
        """Cut a text at added tokens, and before each space that follows a word."""
        if self._pattern is None:
            return _words_of(text)
        parts = self._pattern.split(text)
        if len(parts) == 1:
            return _words_of(text)
        added = self.added
        return [*chain.from_iterable([part] if part in added else _words_of(part) for part in parts if part)]


def _words_of(text: str) -> list[str]:
    if SPACE_BEFORE_SPACE.search(text):
        return SLOW_CUT.split(text)
    # Words stand with the space before them, which is put there in one go.
    first, *others = text.replace(" ", "\0 ").split("\0") if "\0" not in text else SLOW_CUT.split(text)
    return [first, *others] if first else others


def _is_byte_level(config: dict[str, Any] | None) -> bool:
    """Return whether a pre-tokenizer is byte-level with its pattern, or a pattern and then byte-level."""
    steps: Iterable[Any] = (config or {}).get("pretokenizers", [config])
    kinds = [step and step["type"] for step in steps]
    byte_level = next((step for step in steps if step and step["type"] == "ByteLevel"), None)
    if byte_level is None or byte_level["add_prefix_space"]:
        return False
    return (
        kinds == ["ByteLevel"] if byte_level["use_regex"] else kinds[-1] == "ByteLevel" and {*kinds[:-1]} == {"Split"}
    )


def _splits_before_spaces(pre_tokenizer: Any) -> bool:
    """Return whether a pre-tokenizer cuts before a space wherever one follows a character that is none."""

    def pieces(text: str) -> list[tuple[int, int]]:
        return [offsets for _, offsets in pre_tokenizer.pre_tokenize_str(text)]

    rest = {right: pieces(f" {right}") for right in RIGHT}
    for start in map("".join, product(("", "a", "1", "."), LEFT)):
        alone, size = pieces(start), len(start)
        for right in RIGHT:
            if pieces(f"{start} {right}") != [*alone, *((first + size, last + size) for first, last in rest[right])]:
                return False
    return True
