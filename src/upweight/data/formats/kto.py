"""Single answers with a verdict: for KTO. Rows that hold pairs become two examples each."""

from upweight.data.examples import Example, Format, Labelled, Pair, Setup
from upweight.data.formats import pairs
from upweight.data.formats.columns import filled, prompt_text
from upweight.data.formats.markup import FAMILIES, Family, last_answer, single_turn
from upweight.data.raw_row import Row, RowError, flag_at, has, lookup, text_at


def unpaired(examples: list[Example]) -> list[Example]:
    """Each pair as a wanted and an unwanted answer."""
    result: list[Example] = []
    for pair in examples:
        assert isinstance(pair, Pair)
        result += [Labelled(pair.prompt, pair.chosen, True), Labelled(pair.prompt, pair.rejected, False)]
    return result


def or_pairs(labelled: Format, paired: Format) -> Format:
    """Rows with a completion by the one format, rows with two answers by the other."""

    def read(setup: Setup, row: Row) -> list[Example]:
        form = setup.form
        rejected = setup.entry.field_rejected or form.field_rejected
        is_pair = not has(row, form.field_completion) and (has(row, rejected) or has(row, "rejected_response"))
        return unpaired(paired(setup, row)) if is_pair else labelled(setup, row)

    return read


def pairs_only(paired: Format) -> Format:
    """Rows that always hold two answers."""
    return lambda setup, row: unpaired(paired(setup, row))


def verdict(row: Row, key: str = "label") -> bool:
    """Whether a row's answer is wanted."""
    if not has(row, key):
        raise RowError(key, "true or false, since KTO learns which answers are wanted, or pairs: 'chosen', 'rejected'")
    return flag_at(row, key)


def with_prompt(family: Family, user: str) -> Format:
    """A family's text from columns."""

    def read(setup: Setup, row: Row) -> list[Example]:
        messages = single_turn(setup, row, text_at(row, user))
        answer = family.answer(text_at(row, "completion"))
        return [Labelled(family.prompt(messages), answer, verdict(row))]

    return read


def conversation(family: Family) -> Format:
    """A family's text from messages: the user's in `chosen` or in `completion`, the assistant's in `completion`."""

    def read(setup: Setup, row: Row) -> list[Example]:
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
            raise RowError("chosen" if has(row, "chosen") else "completion", "a user turn that says something")
        messages = setup.reader.conversation(row, prompt).messages
        return [Labelled(family.prompt(messages), family.answer(answer), verdict(row))]

    return read


def templated(setup: Setup, row: Row) -> list[Example]:
    """Text by the chat template: messages in one column, the answer in `completion`."""
    key = setup.entry.field_messages or "messages"
    prompt = setup.reader.messages(lookup(row, key), key)
    answer = pairs.last_turn(setup, row, "completion")
    text, (completion,) = setup.template.split(setup.reader.conversation(row, prompt, key), [answer])
    return [Labelled(text, completion, verdict(row))]


def _user_defined_single(setup: Setup, row: Row) -> list[Example]:
    """Columns and the texts they are put into, as the config says."""
    form = setup.form
    prompt = prompt_text(setup, row, form, form.prompt_format, {"prompt": text_at(row, form.field_prompt)})
    completion = filled(form.completion_format, {"completion": text_at(row, form.field_completion)})
    return [Labelled(prompt, completion, verdict(row, form.field_label))]


def _untyped_single(setup: Setup, row: Row) -> list[Example]:
    prompt, completion = lookup(row, "prompt"), lookup(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [Labelled(text_at(row, "prompt"), text_at(row, "completion"), verdict(row))]
    answers = setup.reader.responses(completion, "completion")
    if prompt is not None and answers[0]["role"] == "assistant":
        asked = setup.reader.messages(prompt, "prompt")
    else:
        asked, answers = answers[:-1], answers[-1:]
    text, (answer,) = setup.template.split(setup.reader.conversation(row, asked), [answers])
    return [Labelled(text, answer, verdict(row))]


untyped = or_pairs(_untyped_single, pairs.untyped)
user_defined = or_pairs(_user_defined_single, pairs.user_defined)


def _family_formats(name: str, family: Family) -> dict[str, Format]:
    own = {
        f"{name}.argilla": with_prompt(family, "instruction"),
        f"{name}.argilla_chat": conversation(family),
        f"{name}.intel": with_prompt(family, "question"),
        f"{name}.prompt_pairs": with_prompt(family, "prompt"),
        f"{name}.ultra": with_prompt(family, "prompt"),
    }
    return {key: or_pairs(single, pairs.FORMATS[key]) for key, single in own.items()}


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
