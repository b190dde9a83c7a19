"""Text that formats write themselves: the turn markup of model families, templates with `{column}` placeholders."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.data.examples import Setup
from upweight.data.raw_row import Row, RowError, checked_text
from upweight.data.tokenize.messages import Message

MARK = re.compile(r"<\|\w+\|>")
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")


@dataclass(frozen=True)
class Family:
    """The markup of one model family: what opens a turn (with a `{role}` placeholder) and what closes it."""

    opening: str
    closing: str  # directly after the text of a turn, of the assistant's too
    gap: str  # between two turns

    def prompt(self, messages: Sequence[Message]) -> str:
        """Render messages as text that ends with the opening of the assistant's turn."""
        written = [self._open(message["role"]) + message["content"] + self.closing + self.gap for message in messages]
        return "".join(written) + self._open("assistant")

    def missing_from(self, tokenizer: Any) -> list[str]:
        """Return the marks of turns that are no tokens of a tokenizer, so that it splits them like other text."""
        marks = dict.fromkeys(MARK.findall(self.opening + self.closing))
        unknown = (None, getattr(tokenizer, "unk_token_id", None))
        return [mark for mark in marks if tokenizer.convert_tokens_to_ids(mark) in unknown]

    def _open(self, role: str) -> str:
        return self.opening.replace("{role}", role)


ZEPHYR = Family("<|{role}|>\n", "</s>", "\n")
FAMILIES = {
    "chatml": Family("<|im_start|>{role}\n", "<|im_end|>", "\n"),
    "llama3": Family("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", ""),
}


def family_of(name: object) -> str | None:
    """Return the family whose marks a format or template of this name writes: `chatml.intel`, `alpaca:chatml`."""
    match = re.search(rf"(?:^|[.:_])({'|'.join(FAMILIES)})(?:\.|$)", name) if isinstance(name, str) else None
    return match[1] if match else None


def single_turn(setup: Setup, row: Row, user: str) -> list[Message]:
    """Return the messages of the system text, if there is any, and one user turn."""
    system = row.optional_text(setup.entry.field_system or "system") or setup.data.default_system_message
    turns = [{"role": "system", "content": system}] if system and not setup.entry.drop_system_message else []
    return [*turns, {"role": "user", "content": user}]


def last_answer(messages: Sequence[Message], key: str) -> str:
    """Return the text of the assistant's turn that ends a conversation."""
    if not messages or messages[-1]["role"] != "assistant":
        raise RowError(key, "a list of messages that ends with the assistant's")
    return checked_text(messages[-1]["content"], f"{key}[{len(messages) - 1}].content")


def filled(form: str, values: Mapping[str, str]) -> str:
    """Replace each `{name}` in `form`; doubled braces become single ones, unknown names stay."""
    return PLACEHOLDER.sub(lambda match: match[0][0] if match[1] is None else values.get(match[1], match[0]), form)


def with_system(setup: Setup, row: Row, template: str, values: Mapping[str, str], *, default_system: str = "") -> str:
    """Fill `template`; the system text (`default_system` if there is none) goes first unless it has a placeholder."""
    form = setup.form
    content = row.optional_text(setup.entry.field_system or form.field_system) or form.system_prompt or default_system
    system = filled(form.system_format, {"system": content}) if content else ""
    text = filled(template, {**values, "system": system})
    return text if "{system}" in template else system + text


def prompt_of_form(setup: Setup, row: Row) -> str:
    """Return the prompt column that the config names, put into the config's text template."""
    form = setup.form
    return with_system(setup, row, form.prompt_format, {"prompt": row.text(form.field_prompt)})
