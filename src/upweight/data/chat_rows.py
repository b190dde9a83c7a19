"""Plain texts for a model with a chat template: made turns where the entry asks for it, else a warning."""

from collections.abc import Mapping, Sequence
from typing import Any

from upweight.config.rules.data import CHAT_KINDS
from upweight.config.sections.data import UserFormat
from upweight.data.examples import Example, Format, Setup
from upweight.data.raw_row import Row, RowError, marked, read_label
from upweight.log import inform_once, warn_once

ANSWERS = ("chosen", "rejected", "completion")
ANSWERS_OF = {"pairs": ANSWERS[:2], "text": ANSWERS[2:], "labelled": ANSWERS}  # by the kind of data


def read_as_messages(plain: Format, setup: Setup, row: Row) -> list[Example]:
    """Read a row by the format of rows without a `type`, with its texts made turns."""
    return plain(setup, as_messages(setup, row))


def as_messages(setup: Setup, row: Row) -> Row:
    """Return a row whose prompt is a user's turn and whose answers are an assistant's; messages stay as they are."""
    columns = _columns_of(setup)
    texts = {role: row.value(column) for role, column in columns.items() if row.has(column)}
    prompt = texts.get("prompt")
    if prompt is None:
        raise RowError(columns["prompt"], "a prompt, which `as_messages` makes the user's turn")
    used = {column for column in columns.values() if column in row}
    turns: dict[str, Any] = {name: value for name, value in row.items() if name not in used}
    extra = turns.pop(setup.form.field_input, None) if setup.method.formats() == "text" else None
    if isinstance(prompt, str):
        content = f"{prompt}\n\n{extra}" if isinstance(extra, str) and extra else prompt
        system = row.optional_text(setup.form.field_system) or setup.form.system_prompt
        before = [{"role": "system", "content": system}] if system and not setup.entry.field_system else []
        turns["prompt"] = [*before, {"role": "user", "content": content}]
    else:
        turns["prompt"] = prompt
    for role in ANSWERS:
        if role in texts:
            answer = texts[role]
            turns[role] = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if "label" in texts:
        is_read = setup.method.formats() == "labelled" and "completion" in texts
        turns["label"] = read_label(row, columns["label"]) if is_read else texts["label"]
    return Row(turns)


def empty_parts(setup: Setup, row: Row) -> list[str]:
    """Return which of prompt and answer are blank in a row: a cell that was left empty, or a turn without content."""
    columns, kind, row = _columns_of(setup), setup.method.formats(), marked(setup.form, row) or row
    prompts, answers = [row.value(columns["prompt"])], [row.value(columns[role]) for role in ANSWERS_OF.get(kind, ())]
    turns = row.value(setup.entry.field_messages or "messages" if kind == "text" else "")
    if prompts == answers == [None] and isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns):
        prompts, answers = [turn for turn in turns if turn.get("role") == "user"], turns[-1:]
    return [*["prompt"] * any(map(_is_blank, prompts)), *["answer"] * any(map(_is_blank, answers))]


def _is_blank(value: Any) -> bool:
    """Whether a text is blank, or the turn, or the last of several turns; calls and results of tools may be."""
    last = value[-1] if isinstance(value, list) and value else value
    if isinstance(last, Mapping):
        last = None if last.get("tool_calls") or last.get("role") == "tool" else last.get("content")
    return isinstance(last, str) and not last.strip()


def _columns_of(setup: Setup) -> dict[str, str]:
    """Return the columns of prompt, answers and label: as a mapping names them, else as rows have them."""
    form, is_text = setup.form, setup.method.formats() == "text"
    mapped = isinstance(setup.entry.type, UserFormat)
    columns = {"prompt": form.field_prompt, "chosen": form.field_chosen, "rejected": form.field_rejected}
    columns |= {"completion": form.field_completion, "label": form.field_label}
    if is_text and mapped:
        columns |= {"prompt": form.field_instruction, "completion": form.field_output}
    return columns


def has_plain_prompts(setup: Setup, row: Mapping[str, Any]) -> bool:
    """Return whether prompts are plain text for a model with a chat template, and are not made turns."""
    template = getattr(setup.tokens.tokenizer, "chat_template", None)
    has_choice = setup.method.formats() in CHAT_KINDS and not isinstance(setup.entry.type, str)
    if setup.entry.as_messages or not template or not has_choice:
        return False
    prompt = Row(row).value(_columns_of(setup)["prompt"])
    marks = [mark for mark in setup.tokens.tokenizer.all_special_tokens if len(mark) > 2]
    return isinstance(prompt, str) and not any(mark in prompt for mark in marks)


def tell_of_plain_prompts(unasked: Sequence[str], chosen: Sequence[str]) -> None:
    """Warn once of entries with prompts of plain text, and tell of those that `as_messages: false` chose."""
    turns = "`as_messages: true` there trains on them as turns of a user and an assistant"
    if unasked:
        warn_once(
            f"{', '.join(unasked)}: these prompts are plain text, and the model's chat template is not applied to "
            f"them, while chat programs apply it. {turns}; `as_messages: false` keeps plain text without this warning"
        )
    if chosen:
        inform_once(
            f"{', '.join(chosen)}: prompts stay plain text (`as_messages: false`), as `upweight inference` will write "
            f"them; other chat programs apply the model's chat template. {turns}"
        )
