"""Formats for supervised fine-tuning: conversations, instructions, prompts with completions, raw text."""

from typing import Any

from upweight.config.sections.data import UserFormat
from upweight.data.examples import Example, Format, Setup, Span, Text, Tokens
from upweight.data.formats.columns import prompt_text
from upweight.data.raw_row import (
    RawRow,
    RowError,
    checked_list,
    describe_value,
    first_of,
    has,
    id_list,
    label_list,
    lookup,
    optional_text,
    text_at,
)
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.templates import Turn

ALPACA = UserFormat(
    format="{system}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    no_input_format="{system}\n\n### Instruction:\n{instruction}\n\n### Response:\n",
)
# The system text of rows that have none.
ALPACA_SYSTEM = {
    ALPACA.format: "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
    ALPACA.no_input_format: "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.",
}


def whole_text(setup: Setup, prompt: str, completion: str) -> Text:
    """Join a prompt and its completion; only the completion is trained on unless `train_on_inputs` is set."""
    start = 0 if setup.data.train_on_inputs else len(prompt)
    text = prompt + completion
    return Text(text, [Span(start, len(text))], {"prompt": prompt, "completion": completion})


def chat(setup: Setup, row: RawRow) -> list[Example]:
    """Read messages and render them with the chat template; the assistant's turns are trained on."""
    key = setup.entry.field_messages or first_of(row, ("messages", "conversations"))
    messages = setup.reader.messages(lookup(row, key), key)
    return conversation_texts(setup, setup.reader.conversation(row, messages, key), key)


def conversation_texts(setup: Setup, conversation: Conversation, key: str, first: int = 0) -> list[Example]:
    """Return one text for a conversation, or several if the template changes earlier turns.

    Messages before index `first` are not trained on, nor are roles that the entry does not name.
    """
    if setup.data.train_on_inputs and not setup.entry.roles_to_train:
        text = setup.template.render(conversation).rstrip()
        return [Text(text, [Span(0, len(text))], {"text": text})]
    messages = conversation.messages
    trained = {number for number in range(first, len(messages)) if _is_trained(setup, messages[number], key)}
    if not trained:
        roles = " or ".join(setup.entry.roles_to_train or ["assistant"])
        raise RowError(key, f"at least one turn to train on ({roles})")
    examples: list[Example] = []
    for text, turns in setup.template.turns(conversation, trained):
        spans = [_span(setup, text, turn, conversation.messages[turn.message], key) for turn in turns]
        examples.append(Text(text, spans, {"text": text}))
    return examples


def _is_trained(setup: Setup, message: Message, key: str) -> bool:
    flag = message.get(setup.entry.message_field_training or "")
    if flag is None:
        return message["role"] in (setup.entry.roles_to_train or ["assistant"])
    if not isinstance(flag, bool | int):
        raise RowError(f"{key}.{setup.entry.message_field_training}", f"true or false, got {describe_value(flag)}")
    return bool(flag)


def _span(setup: Setup, text: str, turn: Turn, message: Message, key: str) -> Span:
    name = setup.entry.message_field_training_detail or ""
    detail = message.get(name)
    if detail is None:
        return Span(turn.start, turn.end)
    if not text.startswith(message["content"], turn.start):
        raise RowError(f"{key}.{name}", "a chat template that writes the content as it stands")
    return Span(turn.start, turn.end, holes=tuple(_holes(detail, turn.start, f"{key}.{name}")))


def _holes(detail: Any, start: int, key: str) -> list[tuple[int, int]]:
    holes = []
    for number, part in enumerate(checked_list(detail, key, "character spans")):
        begin, end = (part.get("begin_offset"), part.get("end_offset")) if isinstance(part, dict) else (None, None)
        if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
            raise RowError(f"{key}[{number}]", "begin_offset, end_offset and train")
        if not part.get("train"):
            holes.append((start + begin, start + end + 1))
    return holes


def instruction(setup: Setup, row: RawRow) -> list[Example]:
    """Read instruction, input and output, put into the Alpaca prompt or the config's."""
    form = setup.entry.type if isinstance(setup.entry.type, UserFormat) else ALPACA
    with_input = form.format or ALPACA.format or ""
    without_input = form.no_input_format or form.format or ALPACA.no_input_format or ""
    extra = optional_text(row, form.field_input)
    chosen = with_input if extra else without_input
    values = {"instruction": text_at(row, form.field_instruction), "input": extra}
    prompt = prompt_text(setup, row, form, chosen, values, default_system=ALPACA_SYSTEM.get(chosen, ""))
    return [whole_text(setup, prompt, text_at(row, form.field_output))]


def completion(setup: Setup, row: RawRow) -> list[Example]:
    """Read raw text; all of it is trained on."""
    text = text_at(row, setup.entry.field or "text")
    return [Text(text, [Span(0, len(text))], {"text": text})]


def untyped(setup: Setup, row: RawRow) -> list[Example]:
    """Read rows without a `type`; their columns decide the format."""
    if has(row, "input_ids"):
        return [token_ids(setup, row)]
    if has(row, "prompt") and has(row, "completion"):
        return prompt_and_completion(setup, row)
    for column, read in (
        (setup.entry.field_messages or "messages", chat),
        ("conversations", chat),
        ("instruction", instruction),
    ):
        if has(row, column):
            return read(setup, row)
    if not has(row, setup.entry.field or "text"):
        raise RowError("messages", "messages, prompt and completion, instruction and output, or text")
    return completion(setup, row)


def prompt_and_completion(setup: Setup, row: RawRow) -> list[Example]:
    """Read `prompt` and `completion` as text or as messages."""
    prompt, answer = lookup(row, "prompt"), lookup(row, "completion")
    by_turn = bool(setup.entry.roles_to_train or setup.entry.message_field_training)
    if isinstance(prompt, str) and isinstance(answer, str):
        if by_turn:
            raise RowError(
                "prompt", "messages, because roles_to_train and message_field_training select turns, got text"
            )
        return [whole_text(setup, text_at(row, "prompt"), text_at(row, "completion"))]
    prompt_messages, completion_messages = (
        setup.reader.messages(prompt, "prompt"),
        setup.reader.responses(answer, "completion"),
    )
    conversation = setup.reader.conversation(row, prompt_messages)
    if by_turn:
        first = 0 if setup.data.train_on_inputs else len(conversation.messages)
        return conversation_texts(setup, conversation.then(*completion_messages), "completion", first)
    text, (completion_text,) = setup.template.split(conversation, [completion_messages])
    return [whole_text(setup, text, completion_text)]


def token_ids(setup: Setup, row: RawRow) -> Tokens:
    """Read a tokenized row: `input_ids`, with `labels` (-100: not trained on) or else with masks.

    `assistant_masks` always apply, `completion_mask` applies unless `train_on_inputs` is set.
    """
    ids = id_list(row, "input_ids")
    if has(row, "labels"):
        return Tokens({"ids": ids, "scored": [label != -100 for label in label_list(row, len(ids))]})
    scored = [True] * len(ids)
    for key in ("assistant_masks", *(() if setup.data.train_on_inputs else ("completion_mask",))):
        if has(row, key):
            scored = [old and bool(new) for old, new in zip(scored, _mask(row, key, len(ids)), strict=True)]
    return Tokens({"ids": ids, "scored": scored})


def _mask(row: RawRow, key: str, size: int) -> list[int]:
    mask = checked_list(lookup(row, key), key, "0 and 1")
    if len(mask) != size or any(mark not in (0, 1) for mark in mask):
        raise RowError(key, f"0 or 1 for each of the {size} tokens, got {len(mask)} values")
    return mask


user_defined = instruction

FORMATS: dict[str, Format] = {
    "chat_template": chat,
    "chat_template.default": chat,
    "sharegpt": chat,
    "alpaca": instruction,
    "completion": completion,
    "user_defined": user_defined,
    "passthrough": untyped,
}
