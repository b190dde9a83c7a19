"""Text into token ids: one BOS, an end token where one is missing, and each distinct part tokenized once."""

import re
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from upweight.data.tokenize.word_cache import PLAIN, WordIds
from upweight.errors import UserError

MAX_SPLIT_TOKENS = 64  # distinct special tokens at which texts are split
MAX_CHECKED_TEXTS = 8  # texts on which splitting is compared with tokenizing them whole


class TextTokens:
    """A tokenizer with the rules for BOS and end tokens that all formats share."""

    def __init__(self, tokenizer: Any, eot_tokens: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id
        self.adds_bos = self.bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [self.bos]
        self.turn_ends: set[int] = set()
        for token in eot_tokens:
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or number == tokenizer.unk_token_id:
                raise UserError(f"eot_tokens: the tokenizer does not know '{token}'. Add it under 'tokens'.")
            self.turn_ends.add(number)
        # What ends a text: EOS, `eot_tokens`, and all special tokens but BOS, padding and unknown.
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        special -= {self.bos, tokenizer.pad_token_id, tokenizer.unk_token_id}
        self.ends = frozenset(special | self.turn_ends | ({self.eos} if self.eos is not None else set()))
        self._pattern = _split_pattern(tokenizer)
        self._is_checked = False
        self._words = WordIds.of(tokenizer)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without added special tokens."""
        if self._pattern is None:
            return self._encode_whole(texts)
        # Texts share long prefixes: split before special tokens, each distinct part is tokenized once.
        split_texts = [_split_at_matches(text, self._pattern) for text in texts]
        distinct = list(dict.fromkeys(chain.from_iterable(split_texts)))
        ids_of = dict(zip(distinct, self._encode_whole(distinct), strict=True))
        joined = [list(chain.from_iterable([ids_of[part] for part in parts])) for parts in split_texts]
        if not self._is_checked:  # splitting is turned off if the ids of the first texts differ
            numbers = [number for number, parts in enumerate(split_texts) if len(parts) != 1][:MAX_CHECKED_TEXTS]
            self._is_checked = bool(numbers)
            if self._encode_whole([texts[number] for number in numbers]) != [joined[number] for number in numbers]:
                self._pattern = None
                return self._encode_whole(texts)
        return joined

    def _encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self._words is not None:
            if (ids := self._words.ids(texts)) is not None:
                return ids
            self._words = None
        return self.tokenizer(list(texts), **PLAIN)["input_ids"]

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return the ids with exactly one BOS in front, if the tokenizer adds one to texts."""
        while len(ids) > 1 and ids[0] == ids[1] == self.bos:
            ids = ids[1:]
        return [self.bos, *ids] if self.adds_bos and self.bos is not None and ids[:1] != [self.bos] else ids

    def pinned(self, ids: list[int]) -> int:
        """Return how many leading tokens truncation must keep: 1 for a BOS."""
        return int(self.bos is not None and ids[:1] == [self.bos])

    def with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with an end token appended if they lack one."""
        return ids if self.eos is None or (ids and ids[-1] in self.ends) else [*ids, self.eos]


def _split_at_matches(text: str, pattern: re.Pattern[str]) -> list[str]:
    cuts = [0, *(match.start() for match in pattern.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts) if end > start]


def _split_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens at which splitting is safe, or None if there are none."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    added = list(tokenizer.added_tokens_decoder.values())
    joined = "\0".join(token.content for token in added)
    ends = {token.content[start:] for token in added for start in range(len(token.content))}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    named = set(tokenizer.all_special_tokens)
    exact = [token for token in added if not (token.normalized or token.lstrip or token.rstrip or token.single_word)]
    alone = [token.content for token in exact if token.special and joined.count(token.content) == 1]
    usable = [text for text in alone if not any(text[:stop] in ends for stop in range(1, len(text)))]
    usable.sort(key=lambda content: (content not in named, content not in template))
    return re.compile("|".join(map(re.escape, usable[:MAX_SPLIT_TOKENS]))) if usable else None
