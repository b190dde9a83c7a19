"""Formats of prompts to complete, with the columns that rewards read, for GRPO, GDPO and RLOO."""

from typing import Any

from upweight.data.examples import Example, Format, Prompt, Setup
from upweight.data.formats.markup import prompt_of_form
from upweight.data.raw_row import Row


def trl_columns(setup: Setup, row: Row) -> list[Example]:
    """Read `prompt` as text or as messages; every other column is kept."""
    prompt, columns = row.value("prompt"), _columns_without(row, "prompt")
    if isinstance(prompt, str):
        return [Prompt(prompt, row.text("prompt"), columns)]
    conversation = setup.reader.conversation(row, setup.messages(row, "prompt"))
    return [Prompt([dict(message) for message in prompt], setup.template.prompt(conversation), columns)]


def chat(setup: Setup, row: Row) -> list[Example]:
    """Read messages from the column that `field_messages` names; dots address nested columns."""
    key = setup.entry.field_messages or "messages"
    messages = setup.messages(row, key)
    conversation = setup.reader.conversation(row, messages, key)
    return [Prompt(messages, setup.template.prompt(conversation), _columns_without(row, key, "prompt"))]


def user_defined(setup: Setup, row: Row) -> list[Example]:
    """Read the prompt column that the config names, put into the config's text template."""
    text = prompt_of_form(setup, row)
    return [Prompt(text, text, _columns_without(row, "prompt"))]


def _columns_without(row: Row, *keys: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in keys}


FORMATS: dict[str, Format] = {
    "chat_template": chat,
    "chat_template.default": chat,
    "user_defined": user_defined,
    "user_defined.default": user_defined,
    "passthrough": trl_columns,
}
