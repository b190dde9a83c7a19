"""Formats of preference pairs, for DPO, IPO, SimPO, ORPO and outcome reward models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from upweight.data.examples import Completions, Example, Format, Setup, Tokens
from upweight.data.formats.markup import FAMILIES, ZEPHYR, Family, filled, last_answer, prompt_of_form, single_turn
from upweight.data.raw_row import Row, RowError, checked_mappings, checked_text, common_length
from upweight.data.tokenize.messages import Message

PROMPT_KEYS = ("prompt", "input", "question", "instruction")
PLAIN = {"chosen": ("chosen",), "rejected": ("rejected",)}
RESPONSES = {"chosen": ("chosen_response",), "rejected": ("rejected_response",)}
EITHER = {name: PLAIN[name] + RESPONSES[name] for name in PLAIN}
SPEAKER = "\n\nAssistant:"  # ends the common prefix of pairs that are two whole dialogues

PairMessages = tuple[list[Message], list[Message], list[Message], str]  # prompt, chosen, rejected, key of the prompt


def margin(row: Row) -> dict[str, Any]:
    """Return the column `margin` of a row that has one."""
    value = row.optional_number("margin")
    return {} if value is None else {"margin": value}


def pair(row: Row, prompt: str, chosen: str, rejected: str) -> list[Example]:
    return [Completions(prompt, {"chosen": chosen, "rejected": rejected}, margin(row))]


def with_prompt(  # noqa: PLR0917
    family: Family,
    user: Sequence[str],
    setup: Setup,
    row: Row,
    answers: Mapping[str, Sequence[str]] = PLAIN,
    columns: Callable[[Row], dict[str, Any]] = margin,
    listed: bool = False,
) -> list[Example]:
    """Read columns by the first of their names that a row has, for a family's markup; `listed` ones are messages."""
    messages = single_turn(setup, row, row.text(row.first_of(*user)))
    completions = {}
    for name, keys in answers.items():
        key = row.first_of(*keys)
        text = last_answer(setup.messages(row, key), key) if listed else row.text(key)
        completions[name] = text + family.closing
    return [Completions(family.prompt(messages), completions, columns(row))]


def conversations(family: Family, setup: Setup, row: Row) -> list[Example]:
    """Read two conversations that differ in their last turn, and write a model family's markup."""
    prompt, (chosen,), (rejected,), key = _conversations(setup, row)
    messages = setup.reader.conversation(row, _checked_prompt(prompt, key)).messages
    better, worse = (answer["content"] + family.closing for answer in (chosen, rejected))
    return pair(row, family.prompt(messages), better, worse)


def nectar(setup: Setup, row: Row) -> list[Example]:
    """Read ranked answers; the best one is chosen, the second best is rejected."""
    ranked: list[tuple[float, str]] = []
    items = checked_mappings(row.value("answers"), "answers", "an answer with its rank", "answers with ranks")
    for number, item in enumerate(items):
        rank = Row(item).optional_number("rank")
        if rank is None:
            raise RowError(f"answers[{number}].rank", "a number, got nothing")
        ranked.append((rank, checked_text(item.get("answer"), f"answers[{number}].answer")))
    if len(ranked) < 2:
        raise RowError("answers", "at least two answers")
    (_, chosen), (_, rejected) = sorted(ranked, key=lambda answer: answer[0])[:2]
    system, user = setup.reader.system(row), row.text("prompt")
    prompt = ZEPHYR.prompt([{"role": "system", "content": system}, {"role": "user", "content": user}])
    return [Completions(prompt, {"chosen": chosen, "rejected": rejected})]


def templated(messages_of: Callable[[Setup, Row], PairMessages], setup: Setup, row: Row) -> list[Example]:
    """Render what `messages_of` reads with the chat template."""
    prompt, chosen, rejected, key = messages_of(setup, row)
    conversation = setup.reader.conversation(row, _checked_prompt(prompt, key), key)
    text, (better, worse) = setup.template.split(conversation, [chosen, rejected])
    return pair(row, text, better, worse)


def _messages_and_answers(setup: Setup, row: Row) -> PairMessages:
    """Read the prompt's messages from one column and the assistant's turns from two others."""
    key = setup.entry.field_messages or "messages"
    better, worse = _answer_keys(setup)
    return setup.messages(row, key), last_turn(setup, row, better), last_turn(setup, row, worse), key


def _conversations(setup: Setup, row: Row) -> PairMessages:
    """Read two conversations that differ in their last turn."""
    better, worse = _answer_keys(setup)
    chosen, rejected = setup.messages(row, better), setup.messages(row, worse)
    last_answer(chosen, better)
    last_answer(rejected, worse)
    return chosen[:-1], chosen[-1:], rejected[-1:], better


def _conversations_and_columns(setup: Setup, row: Row) -> PairMessages:
    """Read as `_conversations`, with `system` and, for a single user turn, `prompt` from separate columns."""
    prompt, chosen, rejected, key = _conversations(setup, row)
    users = [message for message in prompt if message["role"] == "user"]
    if len(users) == 1 and (user := row.optional_text("prompt")):
        prompt = [{**message, "content": user} if message is users[0] else message for message in prompt]
    system = row.optional_text(setup.entry.field_system or "system")
    if system and not any(message["role"] == "system" for message in prompt):
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt, chosen, rejected, key


def _from_columns(setup: Setup, row: Row) -> PairMessages:
    """Read system, input and two completions from separate columns."""
    better, worse = _answer_keys(setup)
    prompt = single_turn(setup, row, row.text("input"))
    return prompt, last_turn(setup, row, better), last_turn(setup, row, worse), "input"


def _trl_messages(setup: Setup, row: Row) -> PairMessages:
    """Read two completions with a prompt before them, or two conversations whose common beginning is the prompt."""
    better, worse = (setup.reader.responses(row.value(key), key) for key in ("chosen", "rejected"))
    # Completions that begin with another role's turn hold the whole conversation, whatever `prompt` holds.
    if row.has("prompt") and better[0]["role"] == worse[0]["role"] == "assistant":
        return setup.messages(row, "prompt"), better, worse, "prompt"
    shared = common_length(better[:-1], worse[:-1])
    return better[:shared], better[shared:], worse[shared:], "chosen"


def _answer_keys(setup: Setup) -> tuple[str, str]:
    return setup.entry.field_chosen or "chosen", setup.entry.field_rejected or "rejected"


def last_turn(setup: Setup, row: Row, key: str) -> list[Message]:
    """Return the assistant's turn at `key`: text, a message, or the last of a list; it must not be empty."""
    message = setup.reader.responses(row.value(key), key)[-1]
    if not message["content"] and "tool_calls" not in message:
        raise RowError(f"{key}.content", "text, got an empty text")
    return [message]


def _checked_prompt(prompt: list[Message], key: str) -> list[Message]:
    if not any(message["content"] for message in prompt if message["role"] != "system"):
        raise RowError(key, "a turn with text before the completion")
    return prompt


def user_defined(setup: Setup, row: Row) -> list[Example]:
    """Read the columns that the config names, put into the config's text templates."""
    form = setup.form
    chosen = filled(form.chosen_format, {"chosen": row.text(form.field_chosen)})
    rejected = filled(form.rejected_format, {"rejected": row.text(form.field_rejected)})
    return pair(row, prompt_of_form(setup, row), chosen, rejected)


def trl_columns(setup: Setup, row: Row) -> list[Example]:
    """Read rows without a `type`: text or messages, with a prompt or without, or token ids."""
    if setup.method.head == "sequence_score":
        for suffix in ("ids", "input_ids"):  # the latter is TRL's earlier name
            if row.has(f"chosen_{suffix}") and row.has(f"rejected_{suffix}"):
                return [token_ids(row, suffix)]
    is_text = isinstance(row.value("chosen"), str) and isinstance(row.value("rejected"), str)
    if not is_text or isinstance(row.value("prompt"), list | tuple):
        return templated(_trl_messages, setup, row)
    better, worse = row.text("chosen"), row.text("rejected")
    if row.has("prompt"):
        return pair(row, row.text("prompt"), better, worse)
    return pair(row, *shared_start(better, worse))


def token_ids(row: Row, suffix: str) -> Tokens:
    """Read two tokenized sequences, each with its prompt; their common prefix becomes the prompt."""
    chosen, rejected = row.token_ids(f"chosen_{suffix}"), row.token_ids(f"rejected_{suffix}")
    shared = min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    columns = {"prompt_ids": chosen[:shared], "chosen_ids": chosen[shared:], "rejected_ids": rejected[shared:]}
    return Tokens(columns | margin(row))


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
    usual = partial(with_prompt, family, PROMPT_KEYS, answers=EITHER)
    return {
        name: usual,
        f"{name}.default": usual,
        f"{name}.argilla": partial(with_prompt, family, ("instruction",), answers=RESPONSES),
        f"{name}.argilla_chat": partial(conversations, family),
        f"{name}.icr": partial(with_prompt, family, ("input",)),
        f"{name}.intel": partial(with_prompt, family, ("question",)),
        f"{name}.prompt_pairs": partial(with_prompt, family, ("prompt",)),
        f"{name}.ultra": partial(with_prompt, family, ("prompt",), listed=True),
        f"bradley_terry.{name}.icr": partial(with_prompt, family, ("input",)),
    }


FORMATS: dict[str, Format] = {
    **_family_formats("chatml", FAMILIES["chatml"]),
    **_family_formats("llama3", FAMILIES["llama3"]),
    "zephyr.nectar": nectar,
    "chat_template": partial(templated, _messages_and_answers),
    "chat_template.default": partial(templated, _messages_and_answers),
    "chat_template.argilla_chat": partial(templated, _conversations),
    "chat_template.argilla": partial(templated, _conversations_and_columns),
    "orpo.chat_template": partial(templated, _conversations_and_columns),
    "bradley_terry.chat_template": partial(templated, _from_columns),
    "user_defined": user_defined,
    "user_defined.default": user_defined,
    "passthrough": trl_columns,
}
