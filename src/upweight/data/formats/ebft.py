"""Formats for EBFT: prompts with the true completion that samples should match, or whole documents."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from upweight.data.examples import Example, Format, Prompt, Setup, Text
from upweight.data.formats import prompts, sft
from upweight.data.raw_row import Row, RowError, checked_text, common_length
from upweight.data.tokenize.messages import Conversation, Message
from upweight.data.tokenize.templates import ChatTemplate

THINKING = re.compile(
    r"\s*(?:<think>(.*?)</think>|<reasoning>(.*?)</reasoning>|<\|begin_of_thought\|>(.*?)<\|end_of_thought\|>)\s*",
    re.DOTALL,
)
TRUTH_COLUMNS = ("ground_truth", "completion", "output", "answer")


def example(setup: Setup, row: Row, prompt: list[Message], truth: str, **columns: Any) -> Example:
    conversation = setup.reader.conversation(row, prompt, "messages")
    return _with_truth(setup, Prompt(prompt, setup.template.prompt(conversation), columns), truth, conversation)


def _with_truth(setup: Setup, prompt: Prompt, truth: str, conversation: Conversation | None) -> Example:
    """Return a prompt with its true completion in the column `ground_truth`; in strided mode they are one document."""
    if setup.method.strided:
        return Text.joined(prompt.text, truth)
    turns: tuple[str, ...] = (truth,)
    if conversation is not None:
        answer: Message = {"role": "assistant", "content": truth}
        turns = truth_turns(setup.template, conversation, [answer, *(prompt.columns.get("remaining_turns") or [])])
    return Prompt(prompt.prompt, prompt.text, {**prompt.columns, "ground_truth": truth}, turns)


def truth_turns(template: ChatTemplate, before: Conversation, messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the texts of the assistant's turns, each as if it were the last, and of the others between them."""
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
        probes = [{**messages[rest.start - 1], "content": word} for word in ("A", "B")]
        first, second = (template.render(before.then(probe, *others), ask=True) for probe in probes)
        reply = first[len(first) - common_length(first[::-1], second[::-1]) :]
        texts.append(reply[len(ending) :] if reply.startswith(ending) else reply)
        before = upto.then(*others)


def input_output(setup: Setup, row: Row) -> list[Example]:
    """Read `input` as the prompt and `output` as the true completion."""
    return [example(setup, row, [{"role": "user", "content": row.text("input")}], row.text("output"))]


def _conversation(setup: Setup, row: Row) -> tuple[list[Message], list[int], str]:
    """Return the messages, the indices of the assistant turns that can be sampled, and the key."""
    key = setup.entry.field_messages or row.first_of("messages", "conversations")
    messages = setup.messages(row, key)
    turns = [number for number, message in enumerate(messages) if number and message["role"] == "assistant"]
    if not turns:
        raise RowError(key, "an assistant turn after the first message")
    return messages, turns, key


def _truth_text(message: Message, thinking_key: str, key: str) -> str:
    """Return the text of an assistant message, its reasoning included."""
    thinking, content = message.get(thinking_key), checked_text(message["content"], key, empty=True)
    return checked_text(f"<think>\n{thinking}\n</think>\n\n{content}" if thinking else content, key)


def first_turn(setup: Setup, row: Row) -> list[Example]:
    """Sample the first assistant turn; the turns after it are kept."""
    messages, turns, key = _conversation(setup, row)
    first, truth = turns[0], _truth_text(messages[turns[0]], setup.reader.thinking_to, key)
    return [example(setup, row, messages[:first], truth, remaining_turns=messages[first + 1 :])]


def of_turns(sampled: slice, setup: Setup, row: Row) -> list[Example]:
    """Sample the assistant turns that a slice selects, each in a separate example."""
    messages, turns, key = _conversation(setup, row)
    truths = {turn: _truth_text(messages[turn], setup.reader.thinking_to, key) for turn in turns[sampled]}
    return [example(setup, row, messages[:turn], truth) for turn, truth in truths.items()]


last_turn = partial(of_turns, slice(-1, None))


def split_thinking(setup: Setup, row: Row) -> list[Example]:
    """Sample the last assistant turn, with reasoning moved to `reasoning_content` in every message."""
    messages, turns, key = _conversation(setup, row)
    messages = [_split_reasoning(message) for message in messages]
    return [example(setup, row, messages[: turns[-1]], _truth_text(messages[turns[-1]], "reasoning_content", key))]


def answer_only(setup: Setup, row: Row) -> list[Example]:
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


def document_of_last_turn(setup: Setup, row: Row) -> list[Example]:
    """Read a conversation as one document in which the last assistant turn is scored."""
    messages, turns, key = _conversation(setup, row)
    conversation = setup.reader.conversation(row, messages[: turns[-1] + 1], key)
    return [Text(*turn) for turn in setup.template.turns(conversation, {len(conversation.messages) - 1})]


def document_of_chat(setup: Setup, row: Row) -> list[Example]:
    """Read a conversation as one document in which every assistant turn is scored."""
    messages, _, key = _conversation(setup, row)
    return sft.conversation_texts(setup, setup.reader.conversation(row, messages, key), key)


def document(setup: Setup, row: Row) -> list[Example]:
    """Read a prompt and its completion as one document in which the completion is scored."""
    prompt = row.text(row.first_of("input", "prompt", "question"))
    return [Text.joined(prompt, row.text(row.first_of("output", "completion", "answer")))]


def trl_columns(setup: Setup, row: Row) -> list[Example]:
    """Read rows without a `type`: token ids, a prompt with its true completion, messages, or text."""
    if row.has("input_ids"):
        return [sft.token_ids(setup, row)]
    if row.has("prompt"):
        (prompt,) = prompts.trl_columns(setup, row)
        assert isinstance(prompt, Prompt)
        key = next((name for name in TRUTH_COLUMNS if prompt.columns.get(name) is not None), "ground_truth")
        truth, conversation = checked_text(prompt.columns.pop(key, None), key), None
        if not isinstance(prompt.prompt, str) and prompt.prompt[-1].get("role") != "assistant":
            conversation = setup.reader.conversation(row, setup.messages(row, "prompt"))
        return [_with_truth(setup, prompt, truth, conversation)]
    if row.has(setup.entry.field_messages or "messages") or row.has("conversations"):
        return document_of_chat(setup, row) if setup.method.strided else first_turn(setup, row)
    if setup.method.strided:
        return sft.completion(setup, row)
    raise RowError("prompt", "a prompt and its ground_truth, or messages")


FORMATS: dict[str, Format] = {
    "ebft_opencode.transform": input_output,
    "ebft_chat_multiturn.transform": first_turn,
    "ebft_chat_multiturn.transform_last_turn": last_turn,
    "ebft_chat_multiturn.transform_all_turns": partial(of_turns, slice(None)),
    "ebft_reasoning.transform": last_turn,
    "ebft_reasoning.transform_split_thinking": split_thinking,
    "ebft_reasoning.transform_answer_only": answer_only,
    "ebft_reasoning.transform_strided": document_of_last_turn,
    "ebft_strided_structured.transform": document,
    "ebft_strided_chat.transform": document_of_chat,
    "chat_template": first_turn,
    "completion": sft.completion,
    "passthrough": trl_columns,
}
