"""Formats for distillation: texts whose completions the data has, or prompts that the student completes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from upweight.data.examples import Example, Format, Pieces, Prompt, Segments, Setup, Text, Tokens, WithColumns
from upweight.data.formats import ebft, prompts, sft
from upweight.data.raw_row import Row, RowError, checked_text

TEACHER = "teacher_id"  # the column that names a row's teacher
IDS, LOGPS = "teacher_ids", "teacher_logps"  # columns of a teacher's logged tokens
MINUS_INFINITY = -9000.0  # -9999 stands for it in the answers of vLLM
TEXTS = (Text, Segments, Pieces, Tokens)


def either(offline: Format, online: Format) -> Format:
    """Return a format that reads a row as text, or as a prompt where the student samples completions."""

    def read(setup: Setup, row: Row) -> list[Example]:
        if setup.method.online:
            return [_seen_by_teacher(setup, row, one) if isinstance(one, Prompt) else one for one in online(setup, row)]
        named = {TEACHER: str(row[TEACHER])} if row.has(TEACHER) else {}
        lists = teacher_lists(setup, row)
        examples = offline(setup, row)
        return [WithColumns(one, named, lists) for one in examples if isinstance(one, TEXTS)]

    return read


def _seen_by_teacher(setup: Setup, row: Row, example: Prompt) -> Prompt:
    """Return a prompt with the longer one that a teacher sees: a text with columns of the row, or a function's."""
    if setup.method.teacher_sees is None:
        return example
    prompt, last = example.prompt, None
    if not isinstance(prompt, str):
        last = max((number for number, one in enumerate(prompt) if one.get("role") == "user"), default=len(prompt) - 1)
    asked = prompt if isinstance(prompt, str) else str(prompt[last or 0].get("content"))
    if setup.teacher_prompt is not None:
        made = setup.teacher_prompt(dict(row))
    else:
        try:
            made = setup.method.teacher_sees.format_map({**row, "prompt": asked})
        except (KeyError, IndexError, ValueError) as error:
            raise RowError("distill.privileged_prompt", f"columns of the row in braces; {error} is none") from error
    if isinstance(prompt, str):
        return replace(example, seen_by_teacher=checked_text(made, "distill.privileged_prompt"))
    messages = made
    if isinstance(made, str):
        messages = [{**one, "content": made} if number == last else one for number, one in enumerate(prompt)]
    read = setup.reader.messages(messages, "distill.privileged_prompt")
    return replace(example, seen_by_teacher=setup.template.prompt(setup.reader.conversation(row, read)))


def teacher_lists(setup: Setup, row: Row) -> dict[str, list[list[Any]]]:
    """Return a teacher's logged tokens and log-probs of each token, the most likely first; none where none are."""
    key = setup.entry.logprobs_field or LOGPS
    if not row.has(key):
        if setup.entry.logprobs_field is not None:
            raise RowError(key, "a teacher's log-probs of each token")
        return {}
    logged = row.list_at(key, "lists of log-probs")
    if any(isinstance(one, Mapping) for tokens in logged for one in tokens or ()):
        pairs = [[(_logged_id(one, key), one["logprob"]) for one in tokens or ()] for tokens in logged]
    else:
        ids = row.list_at(IDS if row.has(IDS) else "target_token_ids", "lists of token ids")
        if [len(one or ()) for one in ids] != [len(one or ()) for one in logged]:
            raise RowError(key, "as many log-probs as token ids")
        pairs = [list(zip(a or (), b or (), strict=True)) for a, b in zip(ids, logged, strict=True)]
    known = [sorted((one for one in tokens if one[1] > MINUS_INFINITY), key=lambda one: -one[1]) for tokens in pairs]
    return {
        IDS: [[one[0] for one in tokens] for tokens in known],
        LOGPS: [[one[1] for one in tokens] for tokens in known],
    }


def _logged_id(entry: Mapping[str, Any], key: str) -> int:
    """Return the token id of an entry such as `{"token": "token_id:5", "logprob": -0.1}`."""
    text = str(entry.get("token", "")).removeprefix("token_id:")
    if not text.isdigit() or "logprob" not in entry:
        raise RowError(key, "entries such as {'token': 'token_id:5', 'logprob': -0.1}")
    return int(text)


def keeps_completions(setup: Setup) -> bool:
    """Whether some rows are trained on with the completions that they have."""
    return setup.method.demonstration_share > 0 and not setup.method.teacher_writes


def conversation(setup: Setup, row: Row) -> list[Example]:
    """Read messages: the last assistant turn is sampled, or kept for the share of rows that are not sampled."""
    key = setup.entry.field_messages or row.first_of("messages", "conversations")
    messages = setup.messages(row, key)
    if messages[-1]["role"] != "assistant":
        if keeps_completions(setup):
            raise RowError(key, "an assistant turn at the end, as distill.on_policy is below 1")
        columns = {name: value for name, value in row.items() if name not in (key, "prompt")}
        rendered = setup.template.prompt(setup.reader.conversation(row, messages, key))
        return [Prompt(messages, rendered, columns)]
    (example,) = ebft.last_turn(setup, row)
    assert isinstance(example, Prompt)
    columns = {name: value for name, value in row.items() if name not in (key, "prompt")} | example.columns
    truth = example.truth if keeps_completions(setup) else ()
    return [replace(example, columns=columns, truth=truth)]


def trl_columns(setup: Setup, row: Row) -> list[Example]:
    """Read rows without a `type`: a prompt, with a completion where not all are sampled, or messages."""
    if not row.has("prompt"):
        return conversation(setup, row)
    (prompt,) = prompts.trl_columns(setup, row)
    assert isinstance(prompt, Prompt)
    columns = {name: value for name, value in prompt.columns.items() if name != "completion"}
    prompt = replace(prompt, columns=columns)
    if not keeps_completions(setup):
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
    "passthrough": either(sft.trl_columns, trl_columns),
    "axolotl.integrations.kd.chat_template": either(sft.chat, conversation),
}
