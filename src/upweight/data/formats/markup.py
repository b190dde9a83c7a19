"""The turn markup of model families: chatml, llama3, zephyr."""

from collections.abc import Sequence
from dataclasses import dataclass

from upweight.data.examples import Setup
from upweight.data.raw_row import RawRow, RowError, checked_text, optional_text
from upweight.data.tokenize.messages import Message


@dataclass(frozen=True)
class Family:
    """The markup of one model family: what opens a turn (with a `{role}` placeholder) and what closes it."""

    opening: str
    closing: str  # directly after the text of a turn
    gap: str  # between two turns

    def prompt(self, messages: Sequence[Message]) -> str:
        """Render messages as text that ends with the opening of the assistant's turn."""
        written = [self._open(message["role"]) + message["content"] + self.closing + self.gap for message in messages]
        return "".join(written) + self._open("assistant")

    def answer(self, text: str) -> str:
        """Render the text of the assistant's turn."""
        return text + self.closing

    def _open(self, role: str) -> str:
        return self.opening.replace("{role}", role)


CHATML = Family("<|im_start|>{role}\n", "<|im_end|>", "\n")
LLAMA3 = Family("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "")
ZEPHYR = Family("<|{role}|>\n", "</s>", "\n")
FAMILIES = {"chatml": CHATML, "llama3": LLAMA3}


def single_turn(setup: Setup, row: RawRow, user: str) -> list[Message]:
    """Return the messages of the system text, if there is any, and one user turn."""
    system = optional_text(row, setup.entry.field_system or "system") or setup.data.default_system_message
    turns = [{"role": "system", "content": system}] if system and not setup.entry.drop_system_message else []
    return [*turns, {"role": "user", "content": user}]


def last_answer(messages: Sequence[Message], key: str) -> str:
    """Return the text of the assistant's turn that ends a conversation."""
    if not messages or messages[-1]["role"] != "assistant":
        raise RowError(key, "a list of messages that ends with the assistant's")
    return checked_text(messages[-1]["content"], f"{key}[{len(messages) - 1}].content")
