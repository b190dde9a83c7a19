"""Formats of preference pairs, for DPO, IPO, SimPO, ORPO and outcome reward models."""

from collections.abc import Callable, Sequence
from typing import Any

from upweight.data.examples import Example, Format, Pair, Setup, Tokens
from upweight.data.formats.columns import filled, prompt_text
from upweight.data.formats.markup import FAMILIES, ZEPHYR, Family, last_answer, single_turn
from upweight.data.raw_row import (
    RawRow,
    RowError,
    checked_list,
    checked_text,
    common_length,
    describe_value,
    first_of,
    has,
    id_list,
    lookup,
    optional_number,
    optional_text,
    text_at,
)
from upweight.data.tokenize.messages import Message

PROMPT_KEYS = ("prompt", "input", "question", "instruction")
SPEAKER = "\n\nAssistant:"  # ends the common prefix of pairs that are two whole dialogues


def with_prompt(family: Family, user: str | None, chosen: str | None, rejected: str | None, *, listed: bool) -> Format:
    """Read columns and write a family's markup; None tries the usual names. `listed`: completions are message lists."""

    def answer(setup: Setup, row: RawRow, key: str | None, usual: Sequence[str]) -> str:
        key = key or first_of(row, usual)
        if listed:
            return last_answer(setup.reader.messages(lookup(row, key), key), key)
        return text_at(row, key)

    def read(setup: Setup, row: RawRow) -> list[Example]:
        messages = single_turn(setup, row, text_at(row, user or first_of(row, PROMPT_KEYS)))
        return [
            Pair(
                family.prompt(messages),
                family.answer(answer(setup, row, chosen, ("chosen", "chosen_response"))),
                family.answer(answer(setup, row, rejected, ("rejected", "rejected_response"))),
                optional_number(row, "margin"),
            )
        ]

    return read


def conversations(family: Family) -> Format:
    """Read two conversations that differ in their last turn, and write a model family's markup."""

    def read(setup: Setup, row: RawRow) -> list[Example]:
        chosen = setup.reader.messages(lookup(row, "chosen"), "chosen")
        rejected = setup.reader.messages(lookup(row, "rejected"), "rejected")
        better, worse = last_answer(chosen, "chosen"), last_answer(rejected, "rejected")
        prompt = setup.reader.conversation(row, _checked_prompt(chosen[:-1], "chosen")).messages
        answers = family.answer(better), family.answer(worse)
        return [Pair(family.prompt(prompt), *answers, optional_number(row, "margin"))]

    return read


def nectar(setup: Setup, row: RawRow) -> list[Example]:
    """Read ranked answers; the best one is chosen, the second best is rejected."""
    ranked: list[tuple[float, str]] = []
    for number, item in enumerate(checked_list(lookup(row, "answers"), "answers", "answers with ranks")):
        place = f"answers[{number}]"
        if not isinstance(item, dict):
            raise RowError(place, f"an answer with its rank, got {describe_value(item)}")
        rank = optional_number(item, "rank")
        if rank is None:
            raise RowError(f"{place}.rank", "a number, got nothing")
        ranked.append((rank, checked_text(item.get("answer"), f"{place}.answer")))
    if len(ranked) < 2:
        raise RowError("answers", "at least two answers")
    (_, chosen), (_, rejected) = sorted(ranked, key=lambda pair: pair[0])[:2]
    user: list[Message] = [
        {"role": "system", "content": setup.reader.system(row)},
        {"role": "user", "content": text_at(row, "prompt")},
    ]
    return [Pair(ZEPHYR.prompt(user), chosen, rejected)]


def templated(
    messages_of: Callable[[Setup, RawRow], tuple[list[Message], list[Message], list[Message], str]],
) -> Format:
    """Render with the chat template what `messages_of` reads: prompt, chosen, rejected, key of the prompt."""

    def read(setup: Setup, row: RawRow) -> list[Example]:
        prompt, chosen, rejected, key = messages_of(setup, row)
        conversation = setup.reader.conversation(row, _checked_prompt(prompt, key), key)
        text, (better, worse) = setup.template.split(conversation, [chosen, rejected])
        return [Pair(text, better, worse, optional_number(row, "margin"))]

    return read


def _messages_and_answers(setup: Setup, row: RawRow) -> tuple[list[Message], list[Message], list[Message], str]:
    """Read the prompt's messages from one column and the assistant's turns from two others."""
    key = setup.entry.field_messages or "messages"
    better, worse = _answer_keys(setup)
    prompt = setup.reader.messages(lookup(row, key), key)
    return prompt, last_turn(setup, row, better), last_turn(setup, row, worse), key


def _conversations(setup: Setup, row: RawRow) -> tuple[list[Message], list[Message], list[Message], str]:
    """Read two conversations that differ in their last turn."""
    better, worse = _answer_keys(setup)
    chosen = setup.reader.messages(lookup(row, better), better)
    rejected = setup.reader.messages(lookup(row, worse), worse)
    last_answer(chosen, better)
    last_answer(rejected, worse)
    return chosen[:-1], chosen[-1:], rejected[-1:], better


def _conversations_and_columns(setup: Setup, row: RawRow) -> tuple[list[Message], list[Message], list[Message], str]:
    """Read as `_conversations`, with `system` and, for a single user turn, `prompt` from separate columns."""
    prompt, chosen, rejected, key = _conversations(setup, row)
    users = [number for number, message in enumerate(prompt) if message["role"] == "user"]
    user = optional_text(row, "prompt") if len(users) == 1 else ""
    if user:
        prompt = [*prompt[: users[0]], {**prompt[users[0]], "content": user}, *prompt[users[0] + 1 :]]
    system = optional_text(row, setup.entry.field_system or "system")
    if system and not any(message["role"] == "system" for message in prompt):
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt, chosen, rejected, key


def _from_columns(setup: Setup, row: RawRow) -> tuple[list[Message], list[Message], list[Message], str]:
    """Read system, input and two completions from separate columns."""
    better, worse = _answer_keys(setup)
    prompt = single_turn(setup, row, text_at(row, "input"))
    return prompt, last_turn(setup, row, better), last_turn(setup, row, worse), "input"


def _answer_keys(setup: Setup) -> tuple[str, str]:
    return setup.entry.field_chosen or "chosen", setup.entry.field_rejected or "rejected"


def last_turn(setup: Setup, row: RawRow, key: str) -> list[Message]:
    """Return the assistant's turn at `key`: text, a message, or the last of a list; it must not be empty."""
    message = setup.reader.responses(lookup(row, key), key)[-1]
    if not message["content"] and "tool_calls" not in message:
        raise RowError(f"{key}.content", "text, got an empty text")
    return [message]


def _checked_prompt(prompt: list[Message], key: str) -> list[Message]:
    if not any(message["content"] for message in prompt if message["role"] != "system"):
        raise RowError(key, "a turn with text before the completion")
    return prompt


def user_defined(setup: Setup, row: RawRow) -> list[Example]:
    """Read the columns that the config names, put into the config's text templates."""
    form = setup.form
    return [
        Pair(
            prompt_text(setup, row, form, form.prompt_format, {"prompt": text_at(row, form.field_prompt)}),
            filled(form.chosen_format, {"chosen": text_at(row, form.field_chosen)}),
            filled(form.rejected_format, {"rejected": text_at(row, form.field_rejected)}),
            optional_number(row, "margin"),
        )
    ]


def untyped(setup: Setup, row: RawRow) -> list[Example]:
    """Read rows without a `type`: text or messages, with a prompt or without, or token ids."""
    if setup.method.head == "sequence_score":
        for ending in ("ids", "input_ids"):  # the latter is TRL's earlier name
            if has(row, f"chosen_{ending}") and has(row, f"rejected_{ending}"):
                return [token_ids(row, ending)]
    chosen, rejected, margin = lookup(row, "chosen"), lookup(row, "rejected"), optional_number(row, "margin")
    plain = isinstance(chosen, str) and isinstance(rejected, str)
    if plain and not isinstance(lookup(row, "prompt"), list | tuple):
        better, worse = text_at(row, "chosen"), text_at(row, "rejected")
        if has(row, "prompt"):
            return [Pair(text_at(row, "prompt"), better, worse, margin)]
        return [Pair(*shared_start(better, worse), margin)]
    prompt, better, worse = _conversational(setup, row, chosen, rejected)
    text, (good, bad) = setup.template.split(setup.reader.conversation(row, prompt), [better, worse])
    return [Pair(text, good, bad, margin)]


def token_ids(row: RawRow, ending: str) -> Tokens:
    """Read two tokenized sequences, each with its prompt; their common prefix becomes the prompt."""
    chosen, rejected = id_list(row, f"chosen_{ending}"), id_list(row, f"rejected_{ending}")
    shared = min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    columns = {"prompt_ids": chosen[:shared], "chosen_ids": chosen[shared:], "rejected_ids": rejected[shared:]}
    margin = optional_number(row, "margin")
    return Tokens(columns if margin is None else {**columns, "margin": margin})


def _conversational(
    setup: Setup, row: RawRow, chosen: Any, rejected: Any
) -> tuple[list[Message], list[Message], list[Message]]:
    reader = setup.reader
    better, worse = reader.responses(chosen, "chosen"), reader.responses(rejected, "rejected")
    # Completions that begin with another role's turn hold the whole conversation, whatever `prompt` holds.
    if has(row, "prompt") and better[0]["role"] == worse[0]["role"] == "assistant":
        return _checked_prompt(reader.messages(lookup(row, "prompt"), "prompt"), "prompt"), better, worse
    shared = 0
    while shared < min(len(better), len(worse)) - 1 and better[shared] == worse[shared]:
        shared += 1
    return _checked_prompt(better[:shared], "chosen"), better[shared:], worse[shared:]


def shared_start(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split the common prefix of two texts off as the prompt, cut at the start of a speaker or a word."""
    shared = chosen[: common_length(chosen, rejected)]
    cut = shared.rfind(SPEAKER) + len(SPEAKER)
    if cut < len(SPEAKER):
        cut = len(shared.rstrip())
        if len(shared) == cut and not all(text[cut : cut + 1].isspace() for text in (chosen, rejected)):
            cut = len(shared[: max(shared.rfind(" "), shared.rfind("\n"), 0)].rstrip())
    if not shared[:cut] or chosen == rejected or not chosen[cut:] or not rejected[cut:]:
        raise RowError("prompt", "a prompt, or chosen and rejected with a common prefix")
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _family_formats(name: str, family: Family) -> dict[str, Format]:
    return {
        name: with_prompt(family, None, None, None, listed=False),
        f"{name}.default": with_prompt(family, None, None, None, listed=False),
        f"{name}.argilla": with_prompt(family, "instruction", "chosen_response", "rejected_response", listed=False),
        f"{name}.argilla_chat": conversations(family),
        f"{name}.icr": with_prompt(family, "input", "chosen", "rejected", listed=False),
        f"{name}.intel": with_prompt(family, "question", "chosen", "rejected", listed=False),
        f"{name}.prompt_pairs": with_prompt(family, "prompt", "chosen", "rejected", listed=False),
        f"{name}.ultra": with_prompt(family, "prompt", "chosen", "rejected", listed=True),
        f"bradley_terry.{name}.icr": with_prompt(family, "input", "chosen", "rejected", listed=False),
    }


FORMATS: dict[str, Format] = {
    **_family_formats("chatml", FAMILIES["chatml"]),
    **_family_formats("llama3", FAMILIES["llama3"]),
    "zephyr.nectar": nectar,
    "chat_template": templated(_messages_and_answers),
    "chat_template.default": templated(_messages_and_answers),
    "chat_template.argilla_chat": templated(_conversations),
    "chat_template.argilla": templated(_conversations_and_columns),
    "orpo.chat_template": templated(_conversations_and_columns),
    "bradley_terry.chat_template": templated(_from_columns),
    "user_defined": user_defined,
    "user_defined.default": user_defined,
    "passthrough": untyped,
}
