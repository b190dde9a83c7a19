"""Formats for distillation: texts whose completions the data has, or prompts that the student completes."""

from dataclasses import replace

from upweight.data.examples import Example, Format, Pieces, Prompt, Segments, Setup, Text, Tokens, WithColumns
from upweight.data.formats import ebft, prompts, sft
from upweight.data.raw_row import Row, RowError

TEACHER = "teacher_id"  # the column that names a row's teacher
TEXTS = (Text, Segments, Pieces, Tokens)


def either(offline: Format, online: Format) -> Format:
    """Return a format that reads a row as text, or as a prompt where the student samples completions."""

    def read(setup: Setup, row: Row) -> list[Example]:
        if setup.method.online:
            return online(setup, row)
        examples = offline(setup, row)
        if not row.has(TEACHER):
            return examples
        return [WithColumns(one, {TEACHER: str(row[TEACHER])}) for one in examples if isinstance(one, TEXTS)]

    return read


def conversation(setup: Setup, row: Row) -> list[Example]:
    """Read messages: the last assistant turn is sampled, or kept for the share of rows that are not sampled."""
    key = setup.entry.field_messages or row.first_of("messages", "conversations")
    messages = setup.messages(row, key)
    if messages[-1]["role"] != "assistant":
        if setup.method.demonstration_share:
            raise RowError(key, "an assistant turn at the end, as distill.on_policy is below 1")
        columns = {name: value for name, value in row.items() if name not in (key, "prompt")}
        rendered = setup.template.prompt(setup.reader.conversation(row, messages, key))
        return [Prompt(messages, rendered, columns)]
    (example,) = ebft.last_turn(setup, row)
    assert isinstance(example, Prompt)
    columns = {name: value for name, value in row.items() if name not in (key, "prompt")} | example.columns
    truth = example.truth if setup.method.demonstration_share else ()
    return [replace(example, columns=columns, truth=truth)]


def untyped(setup: Setup, row: Row) -> list[Example]:
    """Read rows without a `type`: a prompt, with a completion where not all are sampled, or messages."""
    if not row.has("prompt"):
        return conversation(setup, row)
    (prompt,) = prompts.untyped(setup, row)
    assert isinstance(prompt, Prompt)
    columns = {name: value for name, value in prompt.columns.items() if name != "completion"}
    prompt = replace(prompt, columns=columns)
    if not setup.method.demonstration_share:
        return [prompt]
    if isinstance(prompt.prompt, str):
        return [replace(prompt, truth=(row.text("completion"),))]
    messages = setup.reader.conversation(row, setup.messages(row, "prompt"))
    answer = row.value("completion")
    response = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return [
        replace(
            prompt, truth=ebft.truth_turns(setup.template, messages, setup.reader.responses(response, "completion")[:1])
        )
    ]


FORMATS: dict[str, Format] = {
    "chat_template": either(sft.chat, conversation),
    "chat_template.default": either(sft.chat, conversation),
    "sharegpt": either(sft.chat, conversation),
    "user_defined": either(sft.instruction, prompts.user_defined),
    "passthrough": either(sft.untyped, untyped),
}
