"""Prompts with the answer that sampled ones should resemble, or whole documents: for EBFT."""

import re
from collections.abc import Sequence
from typing import Any

from upweight.data.examples import Example, Format, Prompt, Setup, Span, Text
from upweight.data.formats import prompts, sft
from upweight.data.raw_row import Row, RowError, checked_text, common_length, first_of, has, lookup, text_at
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.templates import ChatTemplate

THINKING = re.compile(
    r"\s*(?:<think>(.*?)</think>|<reasoning>(.*?)</reasoning>|<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>)\s*",
    re.DOTALL,
)
TRUE_ANSWER = ("ground_truth", "completion", "output", "answer")


def example(setup: Setup, row: Row, prompt: list[Message], truth: str, **columns: Any) -> Example:
    """A prompt of messages with the true answer; in strided mode both as one document."""
    conversation = setup.reader.conversation(row, prompt, "messages")
    text = setup.template.prompt(conversation)
    if is_strided(setup):
        return continuous(text, truth)
    answer: Message = {"role": "assistant", "content": truth}
    turns = answers_and_replies(setup.template, conversation, [answer, *columns.get("remaining_turns", [])])
    return Prompt(prompt, text, {"ground_truth": truth, **columns}, turns)


def answers_and_replies(template: ChatTemplate, before: Conversation, messages: Sequence[Message]) -> tuple[str, ...]:
    """The texts of the assistant's turns, and between them what others say and the template adds, as tokens follow.

    Messages behind the last assistant turn are left out. An earlier turn is taken as it was written, also where the
    template would write it anew.
    """
    number = 0
    texts: list[str] = []
    while True:
        asked, upto = template.render(before, ask=True), before.then(messages[number])
        written, content = template.render(upto).rstrip(), str(messages[number]["content"]).strip()
        ending = written[written.rindex(content) + len(content) :] if content in written else ""
        texts.append(written[len(asked) :] if written.startswith(asked) else content + ending)
        rest = range(number + 1, len(messages))
        number = next((later for later in rest if messages[later]["role"] == "assistant"), 0)
        if not number:
            return tuple(texts)
        others = messages[rest.start : number]
        # What follows an answer does not depend on it: it is the end that two different answers have in common.
        one, two = (
            template.render(before.then({**messages[rest.start - 1], "content": word}, *others), ask=True)
            for word in ("A", "B")
        )
        reply = one[len(one) - common_length(one[::-1], two[::-1]) :]
        texts.append(reply[len(ending) :] if reply.startswith(ending) else reply)
        before = upto.then(*others)


def is_strided(setup: Setup) -> bool:
    """Whether blocks of documents are sampled, and not answers to prompts."""
    return setup.method.strided


def input_output(setup: Setup, row: Row) -> list[Example]:
    """`input` asks, `output` is the true answer."""
    return [example(setup, row, [{"role": "user", "content": text_at(row, "input")}], text_at(row, "output"))]


def _conversation(setup: Setup, row: Row) -> tuple[list[Message], list[int], str]:
    """The messages, the numbers of the assistant's turns that can be asked for, and the key."""
    key = setup.entry.field_messages or first_of(row, ("messages", "conversations"))
    messages = setup.reader.messages(lookup(row, key), key)
    turns = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
    if not turns:
        raise RowError(key, "an assistant turn after the first message")
    return messages, turns, key


def _truth(message: Message, setup: Setup, key: str) -> str:
    """What the assistant wrote, its reasoning included."""
    thinking, content = message.get(setup.reader.thinking_to), checked_text(message["content"], key, empty=True)
    return checked_text(f"<think>\n{thinking}\n</think>\n\n{content}" if thinking else content, key)


def first_turn(setup: Setup, row: Row) -> list[Example]:
    """The first assistant turn is asked for; the turns after it are kept."""
    messages, turns, key = _conversation(setup, row)
    rest, first = messages[turns[0] + 1 :], turns[0]
    return [example(setup, row, messages[:first], _truth(messages[first], setup, key), remaining_turns=rest)]


def last_turn(setup: Setup, row: Row) -> list[Example]:
    """The last assistant turn is asked for."""
    messages, turns, key = _conversation(setup, row)
    return [example(setup, row, messages[: turns[-1]], _truth(messages[turns[-1]], setup, key))]


def all_turns(setup: Setup, row: Row) -> list[Example]:
    """Every assistant turn is asked for, each in an example of its own."""
    messages, turns, key = _conversation(setup, row)
    return [example(setup, row, messages[:turn], _truth(messages[turn], setup, key)) for turn in turns]


def split_thinking(setup: Setup, row: Row) -> list[Example]:
    """As `last_turn`, with reasoning moved into a property of its own in every message."""
    messages, turns, key = _conversation(setup, row)
    messages = [_thinking_apart(message) for message in messages]
    asked = messages[turns[-1]]
    truth = asked["content"]
    if asked["reasoning_content"]:
        truth = f"<think>\n{asked['reasoning_content']}\n</think>\n\n{truth}"
    return [example(setup, row, messages[: turns[-1]], checked_text(truth, key))]


def answer_only(setup: Setup, row: Row) -> list[Example]:
    """As `last_turn`, without the reasoning."""
    messages, turns, key = _conversation(setup, row)
    truth = THINKING.sub("", messages[turns[-1]]["content"]).strip()
    return [example(setup, row, messages[: turns[-1]], checked_text(truth, key))]


def _thinking_apart(message: Message) -> Message:
    match = THINKING.search(message["content"])
    if not match:
        return {**message, "reasoning_content": message.get("reasoning_content", "")}
    content = message["content"][: match.start()] + message["content"][match.end() :]
    thinking = next(part for part in match.groups() if part is not None).strip()
    return {**message, "content": content, "reasoning_content": thinking}


def document_of_last_turn(setup: Setup, row: Row) -> list[Example]:
    """A whole conversation as a document, of which the last assistant turn counts."""
    messages, turns, key = _conversation(setup, row)
    conversation = setup.reader.conversation(row, messages[: turns[-1] + 1], key)
    ((text, (turn,)),) = setup.template.turns(conversation, {len(conversation.messages) - 1})
    return [Text(text, [Span(turn.start, turn.end)], {"text": text})]


def document_of_chat(setup: Setup, row: Row) -> list[Example]:
    """A whole conversation as a document, of which every assistant turn counts."""
    messages, _, key = _conversation(setup, row)
    return sft.conversation_texts(setup, setup.reader.conversation(row, messages, key), key)


def document(setup: Setup, row: Row) -> list[Example]:
    """A prompt and its completion as one text, of which the completion counts."""
    prompt = text_at(row, first_of(row, ("input", "prompt", "question")))
    return [continuous(prompt, text_at(row, first_of(row, ("output", "completion", "answer"))))]


def continuous(prompt: str, completion: str) -> Text:
    """Prompt and completion as one document."""
    text = prompt + completion
    return Text(text, [Span(len(prompt), len(text))], {"prompt": prompt, "completion": completion})


def untyped(setup: Setup, row: Row) -> list[Example]:
    """Rows that say by their columns what they are: token ids, a prompt with its answer, messages, or text."""
    if has(row, "input_ids"):
        return [sft.token_ids(setup, row)]
    if has(row, "prompt"):
        return [_with_truth(setup, row, found) for found in prompts.untyped(setup, row) if isinstance(found, Prompt)]
    if has(row, setup.entry.field_messages or "messages") or has(row, "conversations"):
        return document_of_chat(setup, row) if is_strided(setup) else first_turn(setup, row)
    if is_strided(setup):
        return sft.completion(setup, row)
    raise RowError("prompt", "a prompt and its ground_truth, or messages")


def _with_truth(setup: Setup, row: Row, found: Prompt) -> Example:
    """The prompt with its true answer under the one name that training reads."""
    key = next((name for name in TRUE_ANSWER if found.columns.get(name) is not None), "ground_truth")
    truth = checked_text(found.columns.get(key), key)
    if is_strided(setup):
        return continuous(found.text, truth)
    columns = {name: value for name, value in found.columns.items() if name != key}
    turns: tuple[str, ...] = (truth,)
    if not isinstance(found.prompt, str) and found.prompt[-1].get("role") != "assistant":
        conversation = setup.reader.conversation(row, setup.reader.messages(found.prompt, "prompt"))
        more = columns.get("remaining_turns") or []
        turns = answers_and_replies(setup.template, conversation, [{"role": "assistant", "content": truth}, *more])
    return Prompt(found.prompt, found.text, {"ground_truth": truth, **columns}, turns)


FORMATS: dict[str, Format] = {
    "ebft_opencode.transform": input_output,
    "ebft_chat_multiturn.transform": first_turn,
    "ebft_chat_multiturn.transform_last_turn": last_turn,
    "ebft_chat_multiturn.transform_all_turns": all_turns,
    "ebft_reasoning.transform": last_turn,
    "ebft_reasoning.transform_split_thinking": split_thinking,
    "ebft_reasoning.transform_answer_only": answer_only,
    "ebft_reasoning.transform_strided": document_of_last_turn,
    "ebft_strided_structured.transform": document,
    "ebft_strided_chat.transform": document_of_chat,
    "chat_template": first_turn,
    "completion": sft.completion,
    "passthrough": untyped,
}
