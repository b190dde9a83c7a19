"""Formats for KTO: single completions with a label. Rows that hold pairs become two examples each."""

from functools import partial
from typing import Any

from upweight.data.examples import Completions, Example, Format, Setup
from upweight.data.formats import pairs
from upweight.data.formats.markup import FAMILIES, Family, filled, last_answer, prompt_of_form
from upweight.data.raw_row import Row, RowError, read_label


def unpaired(paired: Format, setup: Setup, row: Row) -> list[Example]:
    """Split each pair that a format reads into a desirable and an undesirable completion."""
    result: list[Example] = []
    for pair in paired(setup, row):
        assert isinstance(pair, Completions)
        sides = (pair.completions["chosen"], True), (pair.completions["rejected"], False)
        result += [Completions(pair.prompt, {"completion": side}, {"label": label}) for side, label in sides]
    return result


def or_pairs(single: Format, paired: Format, setup: Setup, row: Row) -> list[Example]:
    """Read rows with one completion by `single`, rows with two by `paired`."""
    rejected = setup.entry.field_rejected or setup.form.field_rejected
    is_pair = not row.has(setup.form.field_completion) and (row.has(rejected) or row.has("rejected_response"))
    return unpaired(paired, setup, row) if is_pair else single(setup, row)


def label(row: Row, key: str = "label") -> dict[str, Any]:
    """Return the column `label` of a row: whether its completion is desirable."""
    return {"label": read_label(row, key)}


def conversation(family: Family, setup: Setup, row: Row) -> list[Example]:
    """Read messages and write a model family's markup; the user's turn is in `chosen` or in `completion`."""
    completion = setup.messages(row, "completion")
    answer = last_answer(completion, "completion")
    prompt = completion[:-1]
    if not any(message["role"] == "user" for message in prompt):
        if not row.has("chosen"):
            raise RowError("completion", "the user's turn before the assistant's, here or in 'chosen'")
        prompt = setup.messages(row, "chosen")
        while prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
    if not any(message["content"] for message in prompt if message["role"] == "user"):
        raise RowError("chosen" if row.has("chosen") else "completion", "a user turn with text")
    messages = setup.reader.conversation(row, prompt).messages
    return [Completions(family.prompt(messages), {"completion": answer + family.closing}, label(row))]


def _templated_single(setup: Setup, row: Row) -> list[Example]:
    """Render messages of one column and the assistant's turn in `completion` with the chat template."""
    key = setup.entry.field_messages or "messages"
    prompt = setup.reader.conversation(row, setup.messages(row, key), key)
    text, (completion,) = setup.template.split(prompt, [pairs.last_turn(setup, row, "completion")])
    return [Completions(text, {"completion": completion}, label(row))]


def _user_defined_single(setup: Setup, row: Row) -> list[Example]:
    """Read the columns that the config names, put into the config's text templates."""
    form = setup.form
    completion = filled(form.completion_format, {"completion": row.text(form.field_completion)})
    return [Completions(prompt_of_form(setup, row), {"completion": completion}, label(row, form.field_label))]


def _trl_columns(setup: Setup, row: Row) -> list[Example]:
    prompt, completion = row.value("prompt"), row.value("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Completions(row.text("prompt"), {"completion": row.text("completion")}, label(row))]
    answers = setup.reader.responses(completion, "completion")
    if prompt is not None and answers[0]["role"] == "assistant":
        prompt_messages = setup.messages(row, "prompt")
    else:
        prompt_messages, answers = answers[:-1], answers[-1:]
    text, (answer,) = setup.template.split(setup.reader.conversation(row, prompt_messages), [answers])
    return [Completions(text, {"completion": answer}, label(row))]


def _family_formats(name: str, family: Family) -> dict[str, Format]:
    with_prompt = partial(pairs.with_prompt, answers={"completion": ("completion",)}, columns=label)
    return {
        f"{name}.argilla": partial(with_prompt, family, ("instruction",)),
        f"{name}.argilla_chat": partial(conversation, family),
        f"{name}.intel": partial(with_prompt, family, ("question",)),
        f"{name}.prompt_pairs": partial(with_prompt, family, ("prompt",)),
        f"{name}.ultra": partial(with_prompt, family, ("prompt",)),
    }


SINGLE: dict[str, Format] = {
    **_family_formats("chatml", FAMILIES["chatml"]),
    **_family_formats("llama3", FAMILIES["llama3"]),
    "chat_template": _templated_single,
    "chat_template.default": _templated_single,
    "user_defined": _user_defined_single,
    "user_defined.default": _user_defined_single,
    "passthrough": _trl_columns,
}
FORMATS: dict[str, Format] = {
    name: partial(or_pairs, SINGLE[name], paired) if name in SINGLE else partial(unpaired, paired)
    for name, paired in pairs.FORMATS.items()
}
