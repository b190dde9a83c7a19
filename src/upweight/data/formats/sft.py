"""Texts to imitate: conversations, instructions, prompts with completions, raw text."""

from typing import Any

from upweight.config.sections.data import UserFormat
from upweight.data.examples import Example, Format, Setup, Span, Text, Tokens
from upweight.data.formats.columns import filled
from upweight.data.raw_row import Row, RowError, checked_list, first_of, found, has, lookup, optional_text, text_at
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.templates import Turn

ALPACA = UserFormat(
    system_prompt="Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
    format="{system}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    no_input_format="Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n",
)


def whole_text(setup: Setup, prompt: str, completion: str) -> Text:
    """A prompt and its completion, of which the completion is trained on."""
    start = 0 if setup.data.train_on_inputs else len(prompt)
    text = prompt + completion
    return Text(text, [Span(start, len(text))], {"prompt": prompt, "completion": completion})


def chat(setup: Setup, row: Row) -> list[Example]:
    """Messages, rendered by the chat template; the assistant's turns are trained on."""
    key = setup.entry.field_messages or first_of(row, ("messages", "conversations"))
    messages = setup.reader.messages(lookup(row, key), key)
    return conversation_texts(setup, setup.reader.conversation(row, messages, key), key)


def conversation_texts(setup: Setup, conversation: Conversation, key: str) -> list[Example]:
    """One text for a conversation, or several where the template rewrites turns that others follow."""
    if setup.data.train_on_inputs:
        text = setup.template.render(conversation).rstrip()
        return [Text(text, [Span(0, len(text))], {"text": text})]
    wanted = {number for number, message in enumerate(conversation.messages) if _is_trained(setup, message, key)}
    if not wanted:
        roles = " or ".join(setup.entry.roles_to_train or ["assistant"])
        raise RowError(key, f"at least one turn to train on ({roles})")
    examples: list[Example] = []
    for text, turns in setup.template.turns(conversation, wanted):
        spans = [_span(setup, text, turn, conversation.messages[turn.message], key) for turn in turns]
        examples.append(Text(text, spans, {"text": text}))
    return examples


def _is_trained(setup: Setup, message: Message, key: str) -> bool:
    own = message.get(setup.entry.message_field_training or "")
    if own is None:
        return message["role"] in (setup.entry.roles_to_train or ["assistant"])
    if not isinstance(own, bool | int):
        raise RowError(f"{key}.{setup.entry.message_field_training}", f"true or false, found {found(own)}")
    return bool(own)


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


def instruction(setup: Setup, row: Row) -> list[Example]:
    """The columns of `alpaca`, in its own words or in the config's."""
    form = setup.entry.type if isinstance(setup.entry.type, UserFormat) else ALPACA
    with_input = form.format or ALPACA.format or ""
    without_input = form.no_input_format or form.format or ALPACA.no_input_format or ""
    extra = optional_text(row, form.field_input)
    said = optional_text(row, form.field_system) or form.system_prompt
    system = filled(form.system_format, {"system": said}) if said else ""
    values = {"instruction": text_at(row, form.field_instruction), "input": extra, "system": system}
    chosen = with_input if extra else without_input
    prompt = filled(chosen, values)
    if form is not ALPACA and "{system}" not in chosen:
        prompt = system + prompt
    return [whole_text(setup, prompt, text_at(row, form.field_output))]


def completion(setup: Setup, row: Row) -> list[Example]:
    """Raw text, all of it trained on."""
    text = text_at(row, setup.entry.field or "text")
    return [Text(text, [Span(0, len(text))], {"text": text})]


def untyped(setup: Setup, row: Row) -> list[Example]:
    """Rows that say by their columns what they are."""
    if has(row, "input_ids"):
        return [token_ids(row)]
    if has(row, "prompt") and has(row, "completion"):
        return prompt_and_completion(setup, row)
    for column, read in (("messages", chat), ("conversations", chat), ("instruction", instruction)):
        if has(row, column):
            return read(setup, row)
    if not has(row, setup.entry.field or "text"):
        raise RowError("messages", "messages, prompt and completion, instruction and output, or text")
    return completion(setup, row)


def prompt_and_completion(setup: Setup, row: Row) -> list[Example]:
    """`prompt` and `completion` as text or as messages."""
    prompt, answer = lookup(row, "prompt"), lookup(row, "completion")
    if isinstance(prompt, str) and isinstance(answer, str):
        return [whole_text(setup, text_at(row, "prompt"), text_at(row, "completion"))]
    asked, answers = setup.reader.messages(prompt, "prompt"), setup.reader.responses(answer, "completion")
    text, (answered,) = setup.template.split(setup.reader.conversation(row, asked), [answers])
    return [whole_text(setup, text, answered)]


def token_ids(row: Row) -> Tokens:
    """A row that was tokenised elsewhere: `input_ids`, and `labels` that are -100 where nothing is trained on."""
    ids = _numbers(row, "input_ids")
    if not has(row, "labels"):
        return Tokens(ids, [True] * len(ids))
    labels = _numbers(row, "labels")
    if len(labels) != len(ids):
        raise RowError("labels", f"one label for each of the {len(ids)} tokens, found {len(labels)}")
    return Tokens(ids, [label != -100 for label in labels])


def _numbers(row: Row, key: str) -> list[int]:
    values = checked_list(lookup(row, key), key, "token ids")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or (value < 0 and key == "input_ids"):
            raise RowError(key, f"token ids, found {found(value)}")
    return values


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
