"""Formats for KTO: single completions with a label. Rows that hold pairs become two examples each."""

from upweight.data.examples import Example, Format, Labelled, Pair, Setup
from upweight.data.formats import pairs
from upweight.data.formats.columns import filled, prompt_text
from upweight.data.formats.markup import FAMILIES, Family, last_answer, single_turn
from upweight.data.raw_row import RawRow, RowError, flag_at, has, lookup, text_at


def unpaired(examples: list[Example]) -> list[Example]:
    """Split each pair into a desirable and an undesirable completion."""
    result: list[Example] = []
    for pair in examples:
        assert isinstance(pair, Pair)
        result += [Labelled(pair.prompt, pair.chosen, True), Labelled(pair.prompt, pair.rejected, False)]
    return result


def or_pairs(labelled: Format, paired: Format) -> Format:
    """Read rows with one completion by `labelled`, rows with two by `paired`."""

    def read(setup: Setup, row: RawRow) -> list[Example]:
        form = setup.form
        rejected = setup.entry.field_rejected or form.field_rejected
        is_pair = not has(row, form.field_completion) and (has(row, rejected) or has(row, "rejected_response"))
        return unpaired(paired(setup, row)) if is_pair else labelled(setup, row)

    return read


def pairs_only(paired: Format) -> Format:
    """Read rows that always hold two completions."""
    return lambda setup, row: unpaired(paired(setup, row))


def label_at(row: RawRow, key: str = "label") -> bool:
    """Return the label of a row: whether its completion is desirable."""
    if not has(row, key):
        raise RowError(
            key, "true or false, because KTO learns from labelled completions, or pairs: 'chosen', 'rejected'"
        )
    return flag_at(row, key)


def with_prompt(family: Family, user: str) -> Format:
    """Read text columns and write a model family's markup."""

    def read(setup: Setup, row: RawRow) -> list[Example]:
        messages = single_turn(setup, row, text_at(row, user))
        answer = family.answer(text_at(row, "completion"))
        return [Labelled(family.prompt(messages), answer, label_at(row))]

    return read


def conversation(family: Family) -> Format:
    """Read messages and write a model family's markup; the user's turn is in `chosen` or in `completion`."""

    def read(setup: Setup, row: RawRow) -> list[Example]:
        completion = setup.reader.messages(lookup(row, "completion"), "completion")
        answer = last_answer(completion, "completion")
        prompt = completion[:-1]
        if not any(message["role"] == "user" for message in prompt):
            if not has(row, "chosen"):
                raise RowError("completion", "the user's turn before the assistant's, here or in 'chosen'")
            prompt = setup.reader.messages(lookup(row, "chosen"), "chosen")
            while prompt and prompt[-1]["role"] == "assistant":
                prompt = prompt[:-1]
        if not any(message["content"] for message in prompt if message["role"] == "user"):
            raise RowError("chosen" if has(row, "chosen") else "completion", "a user turn with text")
        messages = setup.reader.conversation(row, prompt).messages
        return [Labelled(family.prompt(messages), family.answer(answer), label_at(row))]

    return read


def templated(setup: Setup, row: RawRow) -> list[Example]:
    """Render messages of one column and the assistant's turn in `completion` with the chat template."""
    key = setup.entry.field_messages or "messages"
    prompt = setup.reader.messages(lookup(row, key), key)
    answer = pairs.last_turn(setup, row, "completion")
    text, (completion,) = setup.template.split(setup.reader.conversation(row, prompt, key), [answer])
    return [Labelled(text, completion, label_at(row))]


def _user_defined_single(setup: Setup, row: RawRow) -> list[Example]:
    """Read the columns that the config names, put into the config's text templates."""
    form = setup.form
    prompt = prompt_text(setup, row, form, form.prompt_format, {"prompt": text_at(row, form.field_prompt)})
    completion = filled(form.completion_format, {"completion": text_at(row, form.field_completion)})
    return [Labelled(prompt, completion, label_at(row, form.field_label))]


def _untyped_single(setup: Setup, row: RawRow) -> list[Example]:
    prompt, completion = lookup(row, "prompt"), lookup(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Labelled(text_at(row, "prompt"), text_at(row, "completion"), label_at(row))]
    answers = setup.reader.responses(completion, "completion")
    if prompt is not None and answers[0]["role"] == "assistant":
        prompt_messages = setup.reader.messages(prompt, "prompt")
    else:
        prompt_messages, answers = answers[:-1], answers[-1:]
    text, (answer,) = setup.template.split(setup.reader.conversation(row, prompt_messages), [answers])
    return [Labelled(text, answer, label_at(row))]


untyped = or_pairs(_untyped_single, pairs.untyped)
user_defined = or_pairs(_user_defined_single, pairs.user_defined)


def _family_formats(name: str, family: Family) -> dict[str, Format]:
    single_formats = {
        f"{name}.argilla": with_prompt(family, "instruction"),
        f"{name}.argilla_chat": conversation(family),
        f"{name}.intel": with_prompt(family, "question"),
        f"{name}.prompt_pairs": with_prompt(family, "prompt"),
        f"{name}.ultra": with_prompt(family, "prompt"),
    }
    return {key: or_pairs(single, pairs.FORMATS[key]) for key, single in single_formats.items()}


FORMATS: dict[str, Format] = {
    **{name: pairs_only(paired) for name, paired in pairs.FORMATS.items()},
    **_family_formats("chatml", FAMILIES["chatml"]),
    **_family_formats("llama3", FAMILIES["llama3"]),
    "chat_template": or_pairs(templated, pairs.FORMATS["chat_template"]),
    "chat_template.default": or_pairs(templated, pairs.FORMATS["chat_template"]),
    "user_defined": user_defined,
    "user_defined.default": user_defined,
    "passthrough": untyped,
}
