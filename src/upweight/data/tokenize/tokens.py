"""Text into token ids: one BOS, an end token where one is missing."""

from collections.abc import Sequence
from typing import Any

from upweight.data.tokenize.split_tokenizer import SplitTokenizer
from upweight.errors import UserError


class TextTokens:
    """A tokenizer with the rules for BOS and end tokens that all formats share."""

    def __init__(self, tokenizer: Any, eot_tokens: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self._split_tokenizer = SplitTokenizer(tokenizer)
        self.eos: int | None = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id
        probe = tokenizer("a", verbose=False)["input_ids"]
        self.adds_bos = self.bos is not None and probe[:1] == [self.bos]
        self.turn_ends = self._ids_of_tokens(eot_tokens)
        self.ends = self._ends()

    def _ids_of_tokens(self, tokens: Sequence[str]) -> set[int]:
        ids = {token: self.tokenizer.convert_tokens_to_ids(token) for token in tokens}
        for token, number in ids.items():
            if number is None or number == self.tokenizer.unk_token_id:
                raise UserError(f"eot_tokens: the tokenizer does not know '{token}'. Add it under 'tokens'.")
        return set(ids.values())

    def _ends(self) -> frozenset[int]:
        """Return the tokens that end a text: EOS, `eot_tokens`, and all special tokens but BOS, padding and unknown."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number for number, token in added.items() if token.special} | set(self.tokenizer.all_special_ids)
        fillers = {self.bos, self.tokenizer.pad_token_id, self.tokenizer.unk_token_id}
        eos = {self.eos} if self.eos is not None else set()
        return frozenset((special - fillers) | self.turn_ends | eos)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without added special tokens."""
        return self._split_tokenizer.ids(texts)

    def with_bos(self, ids: list[int]) -> list[int]:
        """Return the ids with exactly one BOS in front, if the tokenizer adds one to texts."""
        while len(ids) > 1 and ids[0] == ids[1] == self.bos:
            ids = ids[1:]
        if self.adds_bos and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def pinned(self, ids: list[int]) -> int:
        """Return how many leading tokens truncation must keep: 1 for a BOS."""
        return int(self.bos is not None and ids[:1] == [self.bos])

    def with_eos(self, ids: list[int]) -> list[int]:
        """Return the ids with an end token appended if they lack one."""
        if self.eos is None or (ids and ids[-1] in self.ends):
            return ids
        return [*ids, self.eos]
