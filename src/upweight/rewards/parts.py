"""Rewards of parts of a completion: a value for each token, or (end, value) pairs. Light to import, for workers."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.errors import UserError

CHARACTERS = "characters"
FORMS = f"one value for each token, (end, value) pairs, or {{'{CHARACTERS}': (end, value) pairs}}"


@dataclass(frozen=True)
class PartRewards:
    """What a function returned for one completion; an end counts all up to it, so that the last may be the length."""

    pairs: list[tuple[int, float]]
    by_token: bool = False  # one value for each token
    in_text: bool = False  # ends count characters instead of tokens

    @property
    def total(self) -> float:
        """The sum of the parts, which is the reward of the completion."""
        return sum(value for _, value in self.pairs)

    def times(self, factor: float) -> Any:
        """Return the parts times a factor, in the form in which a function returns them."""
        pairs = [(end, value * factor) for end, value in self.pairs]
        if self.by_token:
            return [value for _, value in pairs]
        return {CHARACTERS: pairs} if self.in_text else pairs


def part_rewards(item: Any, number: Callable[[Any], float | None]) -> PartRewards | None:
    """Return the rewards of parts that a list or mapping holds, None if it holds no such; `number` reads one value."""
    in_text = isinstance(item, dict) and set(item) == {CHARACTERS}
    listed: Any = item[CHARACTERS] if in_text else item
    listed = listed.tolist() if hasattr(listed, "tolist") else listed
    if not isinstance(listed, list | tuple):
        return None
    if not in_text and listed and not isinstance(listed[0], list | tuple):
        values = [number(value) for value in listed]
        known = [(end, value) for end, value in enumerate(values, 1) if value is not None]
        return PartRewards(known, by_token=True) if len(known) == len(values) else None
    pairs = []
    for pair in listed:
        end, value = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        end, value = number(end), number(value)
        if end is None or value is None or not end.is_integer():
            return None
        pairs.append((int(end), value))
    return PartRewards(pairs, in_text=in_text)


def fitted(
    parts: PartRewards, ids: Sequence[int], text: str | None, decode: Callable[[list[int]], str] | None, where: str
) -> list[tuple[int, float]]:
    """Return (end, value) pairs over the tokens `ids` of a completion; raise a UserError where they do not fit it.

    Without `decode`, as where rewards are tried on written rows, ends in characters stay what they are.
    """
    pairs, count = parts.pairs, len(ids)
    if parts.by_token and len(pairs) != count:
        remedy = "Give one for each entry of completion_ids, or (end, value) pairs"
        raise UserError(f"{where} has {count} tokens, but got {len(pairs)} values. {remedy}.")
    limit, unit = (len(text or ""), "characters") if parts.in_text else (count, "tokens")
    wrong = next((end for end, _ in pairs if not 1 <= end <= limit), None)
    if wrong is not None and not parts.by_token:
        rule = f"An end is the number of {unit} up to the end of its part: 1 to {limit} here"
        raise UserError(f"{where} has {limit} {unit}, but got the end {wrong}. {rule}.")
    if not parts.in_text or decode is None:
        return pairs
    if text is None or decode(list(ids)) != text:
        why = "its text is not that of its tokens, as in an episode of several turns"
        raise UserError(f"{where}: '{CHARACTERS}' cannot be placed: {why}. Give ends in tokens (completion_ids).")

    def covers(tokens: int, end: int) -> bool:
        return decode(list(ids[:tokens])).startswith(text[:end])

    return [(bisect_left(range(count), True, lo=1, key=lambda n, end=end: covers(n, end)), v) for end, v in pairs]
