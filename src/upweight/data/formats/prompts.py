"""Formats of prompts to complete, with the columns that rewards read, for GRPO, GDPO and RLOO."""

from upweight.data.examples import Example, Format, Prompt, Setup
from upweight.data.formats.columns import prompt_text
from upweight.data.raw_row import RawRow, checked_text, lookup, text_at


def untyped(setup: Setup, row: RawRow) -> list[Example]:
    """Read `prompt` as text or as messages; every other column is kept."""
    prompt = lookup(row, "prompt")
    columns = {key: value for key, value in row.items() if key != "prompt"}
    if isinstance(prompt, str):
        return [Prompt(prompt, checked_text(prompt, "prompt"), columns)]
    messages = setup.reader.messages(prompt, "prompt")
    original = [dict(message) for message in prompt]
    return [Prompt(original, setup.template.prompt(setup.reader.conversation(row, messages)), columns)]


def chat(setup: Setup, row: RawRow) -> list[Example]:
    """Read messages from the column that `field_messages` names; dots address nested columns."""
    key = setup.entry.field_messages or "messages"
    messages = setup.reader.messages(lookup(row, key), key)
    columns = {name: value for name, value in row.items() if name not in (key, "prompt")}
    return [Prompt(messages, setup.template.prompt(setup.reader.conversation(row, messages, key)), columns)]


def user_defined(setup: Setup, row: RawRow) -> list[Example]:
    """Read the prompt column that the config names, put into the config's text template."""
    form = setup.form
    text = prompt_text(setup, row, form, form.prompt_format, {"prompt": text_at(row, form.field_prompt)})
    return [Prompt(text, text, {name: value for name, value in row.items() if name != "prompt"})]


FORMATS: dict[str, Format] = {
    "chat_template": chat,
    "chat_template.default": chat,
    "user_defined": user_defined,
    "user_defined.default": user_defined,
    "passthrough": untyped,
}
