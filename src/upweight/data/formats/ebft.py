"""Formats for EBFT: prompts with the true completion that samples should match, or whole documents."""

import re
from collections.abc import Sequence
from typing import Any

from upweight.data.examples import Example, Format, Prompt, Setup, Span, Text
from upweight.data.formats import prompts, sft
from upweight.data.raw_row import RawRow, RowError, checked_text, common_length, first_of, has, lookup, text_at
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.templates import ChatTemplate

THINKING = re.compile(
    r"\s*(?:<think>(.*?)</think>|<reasoning>(.*?)</reasoning>|<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>)\s*",
    re.DOTALL,
)
TRUTH_COLUMNS = ("ground_truth", "completion", "output", "answer")


def example(setup: Setup, row: RawRow, prompt: list[Message], truth: str, **columns: Any) -> Example:
    """Build a prompt with its true completion; in strided mode both become one document."""
    conversation = setup.reader.conversation(row, prompt, "messages")
    text = setup.template.prompt(conversation)
    if is_strided(setup):
        return continuous(text, truth)
    answer: Message = {"role": "assistant", "content": truth}
    turns = truth_turns(setup.template, conversation, [answer, *columns.get("remaining_turns", [])])
    return Prompt(prompt, text, {"ground_truth": truth, **columns}, turns)


def truth_turns(template: ChatTemplate, before: Conversation, messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the texts of the assistant's turns and, between them, of the other turns with the template's markup.

    Messages after the last assistant turn are left out. An earlier turn keeps the text it had when it was the last one,
    also if the template would render it differently afterwards.
    """
    number = 0
    texts: list[str] = []
    while True:
        prompt, upto = template.render(before, ask=True), before.then(messages[number])
        written, content = template.render(upto).rstrip(), str(messages[number]["content"]).strip()
        ending = written[written.rindex(content) + len(content) :] if content in written else ""
        texts.append(written[len(prompt) :] if written.startswith(prompt) else content + ending)
        rest = range(number + 1, len(messages))
        number = next((later for later in rest if messages[later]["role"] == "assistant"), 0)
        if not number:
            return tuple(texts)
        others = messages[rest.start : number]
        # The text after a completion does not depend on it: it is the common suffix of two that differ.
        first, second = (
            template.render(before.then({**messages[rest.start - 1], "content": word}, *others), ask=True)
            for word in ("A", "B")
        )
        reply = first[len(first) - common_length(first[::-1], second[::-1]) :]
        texts.append(reply[len(ending) :] if reply.startswith(ending) else reply)
        before = upto.then(*others)


def is_strided(setup: Setup) -> bool:
    """Return whether EBFT samples blocks of documents rather than completions of prompts."""
    return setup.method.strided


def input_output(setup: Setup, row: RawRow) -> list[Example]:
    """Read `input` as the prompt and `output` as the true completion."""
    return [example(setup, row, [{"role": "user", "content": text_at(row, "input")}], text_at(row, "output"))]


def _conversation(setup: Setup, row: RawRow) -> tuple[list[Message], list[int], str]:
    """Return the messages, the indices of the assistant turns that can be sampled, and the key."""
    key = setup.entry.field_messages or first_of(row, ("messages", "conversations"))
    messages = setup.reader.messages(lookup(row, key), key)
    turns = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
    if not turns:
        raise RowError(key, "an assistant turn after the first message")
    return messages, turns, key


def _truth(message: Message, setup: Setup, key: str) -> str:
    """Return the text of an assistant message, its reasoning included."""
    thinking, content = message.get(setup.reader.thinking_to), checked_text(message["content"], key, empty=True)
    return checked_text(f"<think>\n{thinking}\n</think>\n\n{content}" if thinking else content, key)


def first_turn(setup: Setup, row: RawRow) -> list[Example]:
    """Sample the first assistant turn; the turns after it are kept."""
    messages, turns, key = _conversation(setup, row)
    rest, first = messages[turns[0] + 1 :], turns[0]
    return [example(setup, row, messages[:first], _truth(messages[first], setup, key), remaining_turns=rest)]


def last_turn(setup: Setup, row: RawRow) -> list[Example]:
    """Sample the last assistant turn."""
    messages, turns, key = _conversation(setup, row)
    return [example(setup, row, messages[: turns[-1]], _truth(messages[turns[-1]], setup, key))]


def all_turns(setup: Setup, row: RawRow) -> list[Example]:
    """Sample every assistant turn, each in a separate example."""
    messages, turns, key = _conversation(setup, row)
    return [example(setup, row, messages[:turn], _truth(messages[turn], setup, key)) for turn in turns]


def split_thinking(setup: Setup, row: RawRow) -> list[Example]:
    """Sample the last assistant turn, with reasoning moved to `reasoning_content` in every message."""
    messages, turns, key = _conversation(setup, row)
    messages = [_split_reasoning(message) for message in messages]
    target = messages[turns[-1]]
    truth = target["content"]
    if target["reasoning_content"]:
        truth = f"<think>\n{target['reasoning_content']}\n</think>\n\n{truth}"
    return [example(setup, row, messages[: turns[-1]], checked_text(truth, key))]


def answer_only(setup: Setup, row: RawRow) -> list[Example]:
    """Sample the last assistant turn, without its reasoning."""
    messages, turns, key = _conversation(setup, row)
    truth = THINKING.sub("", messages[turns[-1]]["content"]).strip()
    return [example(setup, row, messages[: turns[-1]], checked_text(truth, key))]


def _split_reasoning(message: Message) -> Message:
    match = THINKING.search(message["content"])
    if not match:
        return {**message, "reasoning_content": message.get("reasoning_content", "")}
    content = message["content"][: match.start()] + message["content"][match.end() :]
    thinking = next(part for part in match.groups() if part is not None).strip()
    return {**message, "content": content, "reasoning_content": thinking}


def document_of_last_turn(setup: Setup, row: RawRow) -> list[Example]:
    """Read a conversation as one document in which the last assistant turn is scored."""
    messages, turns, key = _conversation(setup, row)
    conversation = setup.reader.conversation(row, messages[: turns[-1] + 1], key)
    ((text, (turn,)),) = setup.template.turns(conversation, {len(conversation.messages) - 1})
    return [Text(text, [Span(turn.start, turn.end)], {"text": text})]


def document_of_chat(setup: Setup, row: RawRow) -> list[Example]:
    """Read a conversation as one document in which every assistant turn is scored."""
    messages, _, key = _conversation(setup, row)
    return sft.conversation_texts(setup, setup.reader.conversation(row, messages, key), key)


def document(setup: Setup, row: RawRow) -> list[Example]:
    """Read a prompt and its completion as one document in which the completion is scored."""
    prompt = text_at(row, first_of(row, ("input", "prompt", "question")))
    return [continuous(prompt, text_at(row, first_of(row, ("output", "completion", "answer"))))]


def continuous(prompt: str, completion: str) -> Text:
    """Join a prompt and its completion to one document."""
    text = prompt + completion
    return Text(text, [Span(len(prompt), len(text))], {"prompt": prompt, "completion": completion})


def untyped(setup: Setup, row: RawRow) -> list[Example]:
    """Read rows without a `type`: token ids, a prompt with its true completion, messages, or text."""
    if has(row, "input_ids"):
        return [sft.token_ids(setup, row)]
    if has(row, "prompt"):
        return [_with_truth(setup, row, prompt) for prompt in prompts.untyped(setup, row) if isinstance(prompt, Prompt)]
    if has(row, setup.entry.field_messages or "messages") or has(row, "conversations"):
        return document_of_chat(setup, row) if is_strided(setup) else first_turn(setup, row)
    if is_strided(setup):
        return sft.completion(setup, row)
    raise RowError("prompt", "a prompt and its ground_truth, or messages")


def _with_truth(setup: Setup, row: RawRow, example_prompt: Prompt) -> Example:
    """Return the prompt with its true completion in the column `ground_truth`."""
    key = next((name for name in TRUTH_COLUMNS if example_prompt.columns.get(name) is not None), "ground_truth")
    truth = checked_text(example_prompt.columns.get(key), key)
    if is_strided(setup):
        return continuous(example_prompt.text, truth)
    columns = {name: value for name, value in example_prompt.columns.items() if name != key}
    turns: tuple[str, ...] = (truth,)
    if not isinstance(example_prompt.prompt, str) and example_prompt.prompt[-1].get("role") != "assistant":
        conversation = setup.reader.conversation(row, setup.reader.messages(example_prompt.prompt, "prompt"))
        more = columns.get("remaining_turns") or []
        turns = truth_turns(setup.template, conversation, [{"role": "assistant", "content": truth}, *more])
    return Prompt(example_prompt.prompt, example_prompt.text, {"ground_truth": truth, **columns}, turns)


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
