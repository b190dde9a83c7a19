"""Reads back the messages of a prompt that a chat template has written."""

from functools import cached_property
from typing import Any, NamedTuple

Turn = dict[str, str]
FIRST, SECOND, THIRD = (f"\u2020{number}\u2020" for number in range(3))  # stand for the texts of turns


class _Marks(NamedTuple):
    """What a template writes before, between and after the texts of turns; None where it takes no such turns."""

    before_user: str
    end: str
    before_answer: str | None
    after_answer: str | None
    before_system: str | None
    after_system: str | None


class TurnReader:
    """Reads turns by what a tokenizer's template writes around them; a text is read only if it writes it again."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def messages(self, text: str) -> list[Turn] | None:
        """Return the messages of a rendered prompt; None where the template does not write this text."""
        if (marks := self._marks) is None:
            return None
        bos = getattr(self.tokenizer, "bos_token", None) or ""
        texts = [text, text.removeprefix(bos)]  # the tokenizer adds one that the template may not write
        for one in dict.fromkeys(texts):
            for turns in (_with_system(one, marks), _turns(one, marks.before_user, marks)):
                if turns is not None and self._rendered(turns) == one:
                    return turns
        return None

    @cached_property
    def _marks(self) -> _Marks | None:
        before, end = self._between([("user", FIRST)]) or (None, None)
        if before is None or end is None:
            return None
        several = self._between([("user", FIRST), ("assistant", SECOND), ("user", THIRD)])
        to_answer, to_user = several[1:3] if several and several[1] and several[2] else (None, None)
        system = self._between([("system", FIRST), ("user", SECOND)])
        of_system = system[:2] if system and system[1] else (None, None)
        return _Marks(before, end, to_answer, to_user, *of_system)

    def _between(self, turns: list[tuple[str, str]]) -> list[str] | None:
        """Return what is written before, between and after the texts of turns; None where one of them is left out."""
        rest, parts = self._rendered([{"role": role, "content": content} for role, content in turns]), []
        for _, content in turns:
            before, text, rest = (rest or "").partition(content)
            if not text:
                return None
            parts.append(before)
        return [*parts, rest or ""]

    def _rendered(self, messages: list[Turn]) -> str | None:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template refuses turns that it does not take, each in its own way; some have none
            return None


def _with_system(text: str, marks: _Marks) -> list[Turn] | None:
    """Return the turns of a text that begins with a system text; None where it does not."""
    if not marks.after_system or not text.startswith(marks.before_system or ""):
        return None
    system, mark, rest = text.removeprefix(marks.before_system or "").partition(marks.after_system)
    turns = _turns(rest, "", marks) if mark else None
    return None if turns is None else [{"role": "system", "content": system}, *turns]


def _turns(text: str, start: str, marks: _Marks) -> list[Turn] | None:
    """Return the turns of user and assistant, of which the last is a user's; None where the text has other ones."""
    if not text.startswith(start) or not text.endswith(marks.end) or len(text) < len(start) + len(marks.end):
        return None
    rest, turns = text[len(start) : len(text) - len(marks.end)], list[Turn]()
    while True:
        content, mark, rest = rest.partition(marks.before_answer) if marks.before_answer else (rest, "", "")
        turns.append({"role": "user", "content": content})
        if not mark:
            return turns
        content, mark, rest = rest.partition(marks.after_answer or "\0")
        if not mark:
            return None
        turns.append({"role": "assistant", "content": content})
