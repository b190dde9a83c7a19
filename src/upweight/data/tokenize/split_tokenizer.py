"""Tokenizes many texts that share long prefixes; each distinct part is tokenized once."""

import re
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

MAX_SPLIT_TOKENS = 64  # distinct special tokens at which texts are split
CHECKED = 8  # texts on which splitting is compared with tokenizing them whole


class SplitTokenizer:
    """Splits texts before special tokens, tokenizes the parts and joins their ids.

    A tokenizer isolates special tokens before anything else, so the text on one side of them cannot change the tokens
    on the other. The first texts are tokenized both ways; splitting is turned off if the ids differ.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pattern = _pattern(tokenizer)
        self._is_checked = False

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without added special tokens."""
        if self._pattern is None:
            return self._whole(texts)
        split_texts = [_split(text, self._pattern) for text in texts]
        distinct = list(dict.fromkeys(chain.from_iterable(split_texts)))
        ids_of = dict(zip(distinct, self._whole(distinct), strict=True))
        joined = [list(chain.from_iterable([ids_of[part] for part in parts])) for parts in split_texts]
        return joined if self._agrees(texts, split_texts, joined) else self._whole(texts)

    def _whole(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def _agrees(self, texts: Sequence[str], split_texts: list[list[str]], joined: list[list[int]]) -> bool:
        if not self._is_checked:
            numbers = [number for number, parts in enumerate(split_texts) if len(parts) != 1][:CHECKED]
            self._is_checked = bool(numbers)
            if self._whole([texts[number] for number in numbers]) != [joined[number] for number in numbers]:
                self._pattern = None
                return False
        return True


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    places = [0, *(match.start() for match in pattern.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(places) if end > start]


def _pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens at which splitting is safe, or None if there are none."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    added = list(tokenizer.added_tokens_decoder.values())
    joined = "\0".join(token.content for token in added)
    ends = {token.content[start:] for token in added for start in range(len(token.content))}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    named = set(tokenizer.all_special_tokens)
    usable = [
        token.content
        for token in added
        if token.special
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and joined.count(token.content) == 1
        and not any(token.content[:stop] in ends for stop in range(1, len(token.content)))
    ]
    usable.sort(key=lambda content: (content not in named, content not in template))
    return re.compile("|".join(map(re.escape, usable[:MAX_SPLIT_TOKENS]))) if usable else None
