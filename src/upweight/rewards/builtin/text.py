"""Helpers of built-in rewards: the text of a completion, a column of the row, the marked answer of a text."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from upweight.errors import UserError

ScoreList = list[float | None]
Extract = Literal["auto", "tag", "boxed", "hash", "phrase", "last", "whole"]
Unit = Literal["words", "tokens", "characters"]

_ANSWER_PHRASE = re.compile(r"\banswer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
# Text -> what its closed ``` blocks hold, in order.
fenced_blocks = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE).findall


def texts_of(completions: Sequence[Any]) -> list[str]:
    """Completions, plain or as message lists -> their text (of the last assistant message)."""
    return [completion if isinstance(completion, str) else _final_text(completion) for completion in completions]


def _final_text(messages: Any) -> str:
    if isinstance(messages, dict):
        messages = [messages]
    assistant_messages = [message for message in messages or () if message.get("role", "assistant") == "assistant"]
    content = assistant_messages[-1].get("content") if assistant_messages else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def column_of(columns: dict[str, Any], name: str, reward: str, count: int) -> list[Any]:
    """The keyword lists of a call and a column's name (or its plural) -> that column, one value a completion."""
    for spelling in (name, f"{name}s"):
        values = columns.get(spelling)
        if isinstance(values, list | tuple):
            if len(values) != count:
                raise UserError(f"Reward '{reward}': column '{spelling}' has {len(values)} values for {count} rows.")
            return list(values)
    known = sorted(key for key, value in columns.items() if isinstance(value, list | tuple))
    problem = f"reads the dataset column '{name}', which the rows do not have. There are: {', '.join(known) or 'none'}"
    remedy = f"Keep that column in the dataset or its transform, or name another one in the options of '{reward}'."
    raise UserError(f"Reward '{reward}' {problem}. {remedy}")


def rows_of(columns: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The keyword lists of a call -> the values of each completion's row, by name."""
    named = {name: values for name, values in columns.items() if isinstance(values, list | tuple)}
    return [{name: values[row] for name, values in named.items() if len(values) == count} for row in range(count)]


def between_tags(text: str, tag: str) -> str | None:
    """Text -> what the last closed, innermost `<tag>..</tag>` encloses."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def in_box(text: str) -> str | None:
    r"""Text -> what the last complete `\boxed{..}` encloses, braces matched."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    first, depth = start + len("\\boxed{"), 1
    for position in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[first:position]
    return None


def after_hash(text: str) -> str | None:
    """Text -> the rest of the line after the last `####`."""
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def after_phrase(text: str) -> str | None:
    """Text -> the rest of the sentence after the last "answer is" or "answer:"."""
    marks = list(_ANSWER_PHRASE.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].strip()
    stop = _SENTENCE_END.search(rest)
    return (rest[: stop.start()] if stop else rest).strip(" *_`") or None


def marked_answer(text: str, extract: Extract, tag: str | None) -> str | None:
    """Text -> the part marked as the answer; with "auto" the first of tag, box, hash and phrase."""
    if extract == "tag" or tag is not None:
        return between_tags(text, tag or "answer")
    if extract in ("last", "whole"):
        return text
    finders = {"boxed": in_box, "hash": after_hash, "phrase": after_phrase}
    if extract in finders:
        return finders[extract](text)
    marks = (between_tags(text, "answer"), *(finder(text) for finder in finders.values()))
    return next((mark for mark in marks if mark is not None), None)


def normalised(text: str) -> str:
    """Text -> the same without case, width, outer punctuation, emphasis, or spacing differences."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .,;:!?\"'`*_")


def units_of(completions: Sequence[Any], columns: dict[str, Any], unit: Unit, reward: str) -> list[Sequence[Any]]:
    """Completions and the keyword lists of their call -> the words, token ids or characters of each."""
    if unit != "tokens":
        return [text.split() if unit == "words" else text for text in texts_of(completions)]
    if columns.get("completion_ids") is None:
        raise UserError(f"Reward '{reward}': unit 'tokens' needs completion_ids, which were not given. Use 'words'.")
    return list(columns["completion_ids"])
