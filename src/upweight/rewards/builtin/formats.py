"""Rewards for the shape of a completion: tags, patterns, JSON."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat

from upweight.errors import UserError
from upweight.rewards.builtin.spec import builtin
from upweight.rewards.builtin.text import ScoreList, between_tags, fenced_blocks, texts_of

Tags = Annotated[list[Annotated[str, Field(pattern=r"^[^<>\s/]+$")]], Field(min_length=1)]
JsonType = Literal["string", "number", "integer", "boolean", "array", "object", "null"]


@builtin
class FormatReward:
    """Scores a completion made of the tags, each once, in order, filled, with only space between them."""

    tags: Tags = Field(default_factory=lambda: ["reasoning", "answer"])
    where: Literal["whole", "anywhere"] = "whole"
    allow_empty: bool = False
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "format"

    def __call__(self, completions: list[Any], **_: Any) -> ScoreList:
        return [self.score if self._matches_format(text) else self.wrong for text in texts_of(completions)]

    def _matches_format(self, text: str) -> bool:
        position = 0
        for index, tag in enumerate(self.tags):
            opening, closing = f"<{tag}>", f"</{tag}>"
            start, end = text.find(opening, position), text.find(closing, position)
            if not position <= start < end or text.count(opening) != 1 or text.count(closing) != 1:
                return False
            before_is_free = index == 0 and self.where == "anywhere"
            if text[position:start].strip() and not before_is_free:
                return False
            if not self.allow_empty and not text[start + len(opening) : end].strip():
                return False
            position = end + len(closing)
        return self.where == "anywhere" or not text[position:].strip()


@builtin
class IncrementalFormatReward:
    """Gives an equal share for each opening and closing tag met exactly once, less text after the last one."""

    tags: Tags = Field(default_factory=lambda: ["reasoning", "answer"])
    score: float = 1.0
    trailing_penalty: NonNegativeFloat = 0.001
    lowest: float = -1.0
    __name__ = "incremental_format"

    def __call__(self, completions: list[Any], **_: Any) -> ScoreList:
        return [self._score(text) for text in texts_of(completions)]

    def _score(self, text: str) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        score = self.score * sum(text.count(mark) == 1 for mark in marks) / len(marks)
        _, closed, trailing = text.rpartition(marks[-1])
        if closed:
            score -= self.trailing_penalty * len(trailing.strip())
        return max(score, self.lowest)


@builtin
class XmlTagsReward:
    """Gives the share of the tags that stand in the text exactly once, closed after they are opened, and filled."""

    tags: Tags
    score: float = 1.0
    __name__ = "xml_tags"

    def __call__(self, completions: list[Any], **_: Any) -> ScoreList:
        counts = [sum(_has_tag(text, tag) for tag in self.tags) for text in texts_of(completions)]
        return [self.score * count / len(self.tags) for count in counts]


def _has_tag(text: str, tag: str) -> bool:
    is_once = text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1
    return is_once and bool((between_tags(text, tag) or "").strip())


@builtin
class RegexReward:
    """Scores a completion in which a regular expression matches."""

    pattern: str
    where: Literal["anywhere", "start", "whole"] = "anywhere"
    flags: Annotated[str, Field(pattern=r"^[imsx]*$")] = ""
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "regex"

    def __post_init__(self) -> None:
        try:
            self._compiled()
        except re.error as error:
            raise UserError(f"Reward 'regex': the pattern {self.pattern!r} does not compile: {error}.") from error

    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, sum(re.RegexFlag[letter.upper()] for letter in set(self.flags)))

    def __call__(self, completions: list[Any], **_: Any) -> ScoreList:
        compiled = self._compiled()
        match = {"anywhere": compiled.search, "start": compiled.match, "whole": compiled.fullmatch}[self.where]
        return [self.score if match(text) else self.wrong for text in texts_of(completions)]


@builtin
class JsonReward:
    """Scores a completion that is valid JSON (bare or in a fenced block) with the keys and types asked for."""

    keys: list[str] = Field(default_factory=list)
    types: dict[str, JsonType] = Field(default_factory=dict)
    fenced: Literal["allow", "require", "forbid"] = "allow"
    partial: bool = False
    score: float = 1.0
    wrong: float = 0.0
    __name__ = "json"

    def __call__(self, completions: list[Any], **_: Any) -> ScoreList:
        return [self._score(text) for text in texts_of(completions)]

    def _score(self, text: str) -> float:
        blocks = fenced_blocks(text) if self.fenced != "forbid" else []
        try:
            body = blocks[-1] if blocks else "" if self.fenced == "require" else text
            value = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return self.wrong
        wanted: dict[str, JsonType | None] = {key: self.types.get(key) for key in [*self.keys, *self.types]}
        if wanted and not isinstance(value, dict):
            return self.wrong
        met = sum(key in value and (kind is None or _is_a(value[key], kind)) for key, kind in wanted.items())
        if met == len(wanted):
            return self.score
        return self.wrong + (self.score - self.wrong) * (1 + met) / (1 + len(wanted)) if self.partial else self.wrong


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _is_a(value: Any, kind: JsonType) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    classes = {"string": str, "number": int | float, "integer": int, "array": list, "object": dict}
    return kind in classes and isinstance(value, classes[kind])
