"""Text into token ids: one BOS, an end token where one is missing, and boundaries found by tokens."""

from collections.abc import Sequence
from typing import Any

from upweight.data.rows import RowError


class TextTokens:
    """A tokenizer with the rules that every format shares."""

    def __init__(self, tokenizer: Any, eot_tokens: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.eos: int | None = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id
        begun = tokenizer("a", verbose=False)["input_ids"]
        self.adds_bos = self.bos is not None and bool(begun) and begun[0] == self.bos
        self.turn_ends = {tokenizer.convert_tokens_to_ids(token) for token in eot_tokens} - {
            None,
            tokenizer.unk_token_id,
        }
        self.ends = self._ends()

    def _ends(self) -> frozenset[int]:
        """Tokens that end a text: EOS, the config's, and every special token that is no filler."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number for number, token in added.items() if token.special} | set(self.tokenizer.all_special_ids)
        fillers = {self.bos, self.tokenizer.pad_token_id, self.tokenizer.unk_token_id}
        eos = {self.eos} if self.eos is not None else set()
        return frozenset((special - fillers) | self.turn_ends | eos)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]

    def begun(self, ids: list[int]) -> list[int]:
        """The ids with exactly one BOS in front, where the tokenizer begins texts with one."""
        while len(ids) > 1 and ids[0] == ids[1] == self.bos:
            ids = ids[1:]
        if self.adds_bos and self.bos is not None and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids

    def pinned(self, ids: list[int]) -> int:
        """Leading tokens that truncation must keep."""
        return int(self.bos is not None and ids[:1] == [self.bos])

    def ended(self, ids: list[int]) -> list[int]:
        """The ids with an end token."""
        if self.eos is None or (ids and ids[-1] in self.ends):
            return ids
        return [*ids, self.eos]

    def split(self, prompt: str, answers: dict[str, str]) -> tuple[list[int], list[list[int]]]:
        """Ids of a prompt and of the answers (by key) that follow it; a token that spans both is the answers'."""
        for key, answer in answers.items():
            if not answer:
                raise RowError(key, "text, found an empty text")
        alone, *whole = self.ids([prompt, *(prompt + answer for answer in answers.values())])
        shared = min(common_length(alone, ids) for ids in whole)
        prompt_ids = self.begun(alone[:shared])
        if not prompt_ids:
            raise RowError("prompt", "text that makes at least one token before the answer")
        for key, ids in zip(answers, whole, strict=True):
            if len(ids) <= shared:
                raise RowError(key, "text that makes at least one token")
        return prompt_ids, [self.ended(ids[shared:]) for ids in whole]

    def boundaries(self, text: str, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids of a text, and for each place in it the number of tokens that lie wholly before."""
        ids, *before = self.ids([text, *(text[:place] for place in places)])
        return ids, [common_length(ids, part) for part in before]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(number for number in range(length) if first[number] != second[number])
