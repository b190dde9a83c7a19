"""Formats for supervised fine-tuning: conversations, instructions, prompts with completions, raw text."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from upweight.data.examples import ALPACA, Example, Format, Pieces, Segment, Segments, Setup, Text, Tokens
from upweight.data.formats import prompt_styles
from upweight.data.formats.markup import with_system
from upweight.data.raw_row import Row, RowError, checked_mappings, describe_value
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.templates import Span
from upweight.types import IGNORED

# The system text of rows that have none.
ALPACA_SYSTEM = {
    ALPACA.format: prompt_styles.WITH_INPUT,
    ALPACA.no_input_format: prompt_styles.WITHOUT_INPUT,
}


def chat(setup: Setup, row: Row) -> list[Example]:
    """Read messages and render them with the chat template; the assistant's turns are trained on."""
    key = setup.entry.field_messages or row.first_of("messages", "conversations")
    value = row.value(key)
    if isinstance(value, str) and not setup.data.train_on_inputs and not setup.entry.roles_to_train:
        messages = setup.reader.messages(_conversation_in_text(value, key), key)
    else:
        messages = setup.messages(row, key)
    return conversation_texts(setup, setup.reader.conversation(row, messages, key), key)


def _conversation_in_text(text: str, key: str) -> list[Any]:
    """Return the messages that a text holds as JSON, as cells of a CSV do."""
    with suppress(ValueError, RecursionError):
        if isinstance(messages := json.loads(text), list) and messages:
            return messages
    transform = "a function named by `type` can make it of other texts"
    raise RowError(key, f"a list of messages, or JSON text of one, got {describe_value(text)}; {transform}")


def conversation_texts(setup: Setup, conversation: Conversation, key: str, first: int = 0) -> list[Example]:
    """Return the texts of a conversation, several if the template changes earlier turns; training begins at `first`."""
    if setup.data.train_on_inputs and not setup.entry.roles_to_train:
        return [Text.all_trained(setup.template.render(conversation).rstrip())]
    messages = conversation.messages
    trained = {number for number in range(first, len(messages)) if _is_trained(setup, messages[number], key)}
    if not trained:
        roles = " or ".join(_roles(setup)) or "'roles_to_train' is empty"
        flag = setup.entry.message_field_training
        masked = any(message.get(flag or "") is False for message in messages)
        reason = f", and {flag!r} is false where one could be" if masked else ""
        raise RowError(key, f"at least one turn to train on ({roles}){reason}; a 'filter' leaves rows out")
    turns = setup.template.turns(conversation, trained)
    return [Text(text, [_with_untrained(setup, text, span, messages, key) for span in spans]) for text, spans in turns]


def _roles(setup: Setup) -> list[str]:
    """Return the roles that are trained on; an empty list leaves the choice to the messages themselves."""
    return ["assistant"] if setup.entry.roles_to_train is None else setup.entry.roles_to_train


def _is_trained(setup: Setup, message: Message, key: str) -> bool:
    flag = message.get(setup.entry.message_field_training or "")
    if flag is None:
        detail = message.get(setup.entry.message_field_training_detail or "")
        return message["role"] in _roles(setup) if detail is None else bool(detail)
    if not isinstance(flag, bool | int):
        raise RowError(f"{key}.{setup.entry.message_field_training}", f"true or false, got {describe_value(flag)}")
    return bool(flag)


def _with_untrained(setup: Setup, text: str, span: Span, messages: list[Message], key: str) -> Span:
    """Return the range of a turn without what `message_field_training_detail` does not name as trained on."""
    name, message = setup.entry.message_field_training_detail or "", messages[span.message]
    detail, key, chosen = message.get(name), f"{key}.{name}", []
    if detail is None:
        return span
    if not text.startswith(message["content"], span.start):
        raise RowError(key, "a chat template that writes the content as it stands")
    spans = checked_mappings(detail, key, "begin_offset, end_offset and train", "character spans")
    for number, part in enumerate(spans):
        begin, end = part.get("begin_offset"), part.get("end_offset")
        if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
            raise RowError(f"{key}[{number}]", "begin_offset, end_offset and train")
        if part.get("train"):
            chosen.append((begin, end + 1))
    untrained, at = [], 0
    for begin, end in [*sorted(chosen), (len(message["content"]),) * 2]:
        if begin > at:
            untrained.append((span.start + at, span.start + begin))
        at = max(at, end)
    return replace(span, untrained=tuple(untrained))


def instruction(setup: Setup, row: Row) -> list[Example]:
    """Read instruction, input and output, put into the Alpaca prompt or the config's."""
    prompt, answer = instruction_prompt(setup, row), row.text(setup.form.field_output)
    return [Segments((Segment(prompt, setup.data.train_on_inputs), Segment(answer, True, 1)))]


def instruction_prompt(setup: Setup, row: Row) -> str:
    """Return the text before the answer to an instruction."""
    form = setup.form
    extra = row.optional_text(form.field_input)
    template = form.format or ALPACA.format
    if not extra:
        template = form.no_input_format or form.format or ALPACA.no_input_format
    values = {"instruction": row.text(form.field_instruction), "input": extra}
    return with_system(setup, row, template or "", values, default_system=ALPACA_SYSTEM.get(template, ""))


def completion(setup: Setup, row: Row) -> list[Example]:
    """Read raw text; all of it is trained on."""
    return [Text.all_trained(row.text(setup.entry.field or "text"))]


def pieces(setup: Setup, row: Row) -> list[Example]:
    """Read raw text and split it into pieces of `sequence_len`; all of it is trained on."""
    return [Pieces(row.text(setup.entry.field or "text"))]


def pretrain(setup: Setup, row: Row) -> list[Example]:
    """Read raw text and split it into windows that overlap; all of it is trained on."""
    return [Pieces(row.text(setup.entry.text_column or "text"), windows=True)]


def trl_columns(setup: Setup, row: Row) -> list[Example]:
    """Read rows without a `type`; their columns decide the format."""
    if row.has("input_ids"):
        return [token_ids(setup, row)]
    if row.has("prompt") and row.has("completion"):
        return prompt_and_completion(setup, row)
    if row.has(setup.entry.field_messages or "messages") or row.has("conversations"):
        return chat(setup, row)
    text = setup.entry.field or "text"
    if row.has("instruction") and not (setup.entry.field and row.has(text)):
        return instruction(setup, row)
    if not row.has(text):
        read = ("completion", "prompt", setup.entry.field_messages or "messages", "instruction", text)
        empty = next((key for key in read if key in row and not row.has(key)), setup.entry.field or "messages")
        raise RowError(empty, f"messages, prompt and completion, instruction and output, or {text}")
    return completion(setup, row)


def prompt_and_completion(setup: Setup, row: Row) -> list[Example]:
    """Read `prompt` and `completion` as text or as messages."""
    prompt, answer = row.value("prompt"), row.value("completion")
    with_prompt = setup.data.train_on_inputs
    by_turn = bool(setup.entry.roles_to_train or setup.entry.message_field_training)
    if isinstance(prompt, str) and isinstance(answer, str):
        if by_turn:
            raise RowError("prompt", "messages, as roles_to_train and message_field_training select turns, got text")
        return [Text.joined(row.text("prompt"), row.text("completion"), with_prompt=with_prompt)]
    prompt_messages, completion = setup.messages(row, "prompt"), setup.reader.responses(answer, "completion")
    conversation = setup.reader.conversation(row, prompt_messages)
    if by_turn:
        first = 0 if with_prompt else len(conversation.messages)
        return conversation_texts(setup, conversation.then(*completion), "completion", first)
    text, (completion_text,) = setup.template.split(conversation, [completion])
    return [Text.joined(text, completion_text, with_prompt=with_prompt)]


def token_ids(setup: Setup, row: Row) -> Tokens:
    """Read `input_ids` with `labels` (-100: not trained on), or with masks, of completions unless `train_on_inputs`."""
    ids = row.token_ids("input_ids")
    if row.has("labels"):
        return Tokens({"input_ids": ids, "loss_mask": [label != IGNORED for label in row.token_labels(len(ids))]})
    loss_mask = [True] * len(ids)
    for key in ("assistant_masks", *(() if setup.data.train_on_inputs else ("completion_mask",))):
        if row.has(key):
            mask = row.list_at(key, "0 and 1")
            if len(mask) != len(ids) or any(mark not in (0, 1) for mark in mask):
                raise RowError(key, f"0 or 1 for each of the {len(ids)} tokens, got {len(mask)} values")
            loss_mask = [old and bool(new) for old, new in zip(loss_mask, mask, strict=True)]
    return Tokens({"input_ids": ids, "loss_mask": loss_mask})


FORMATS: dict[str, Format] = {
    "chat_template": chat,
    "chat_template.default": chat,
    "sharegpt": chat,
    "alpaca": instruction,
    "completion": pieces,
    "pretrain": pretrain,
    "user_defined": instruction,
    "passthrough": trl_columns,
    **prompt_styles.FORMATS,
}
