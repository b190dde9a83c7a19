"""Many texts into token ids, where texts share long beginnings: each distinct piece is tokenised once."""

import re
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

MOST_CUTS = 64  # kinds of special tokens that texts are cut at
CHECKED = 8  # texts on which cutting is compared with not cutting


class SplitTokenizer:
    """Cuts texts before special tokens, tokenises the pieces, joins their ids.

    A tokenizer sets special tokens apart before it looks at anything else, so that what stands on one side of them
    cannot change the tokens on the other. The first texts are tokenised both ways; a difference ends the cutting.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._cuts = _cuts(tokenizer)
        self._is_checked = False

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        if self._cuts is None:
            return self._whole(texts)
        cut = [_pieces(text, self._cuts) for text in texts]
        distinct = list(dict.fromkeys(chain.from_iterable(cut)))
        found = dict(zip(distinct, self._whole(distinct), strict=True))
        joined = [list(chain.from_iterable([found[piece] for piece in pieces])) for pieces in cut]
        return joined if self._agrees(texts, cut, joined) else self._whole(texts)

    def _whole(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def _agrees(self, texts: Sequence[str], cut: list[list[str]], joined: list[list[int]]) -> bool:
        if not self._is_checked:
            numbers = [number for number, pieces in enumerate(cut) if len(pieces) != 1][:CHECKED]
            self._is_checked = bool(numbers)
            if self._whole([texts[number] for number in numbers]) != [joined[number] for number in numbers]:
                self._cuts = None
                return False
        return True


def _pieces(text: str, cuts: re.Pattern[str]) -> list[str]:
    places = [0, *(match.start() for match in cuts.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(places) if end > start]


def _cuts(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the special tokens that nothing around them can change; None where there are none."""
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
    return re.compile("|".join(map(re.escape, usable[:MOST_CUTS]))) if usable else None
