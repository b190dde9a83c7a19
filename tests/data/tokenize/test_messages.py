"""Messages as rows hold them."""

import numpy as np
import pytest

from upweight.config.sections.data import DatasetSpec
from upweight.data.raw_row import Row, RowError
from upweight.data.tokenize.messages import MessageReader


def read(value, **entry):
    return MessageReader(DatasetSpec(**entry)).messages(value, "messages")


def test_other_properties_and_names():
    message = {"speaker": "human", "said": "hi", "name": "Ann", "score": None}
    entry = {"message_property_mappings": {"role": "speaker", "content": "said"}}
    assert read([message], **entry) == [{"role": "user", "content": "hi", "name": "Ann"}]
    older = {"message_field_role": "speaker", "message_field_content": "said"}
    assert read([message], **older) == [{"role": "user", "content": "hi", "name": "Ann"}]


def test_roles_of_the_config_come_on_top():
    entry = {"roles": {"user": ["customer"], "ipython": "code"}}
    assert [message["role"] for message in read(
        [{"role": role, "content": "x"} for role in ("customer", "user", "code", "ipython", "model")], **entry
    )] == ["user", "user", "ipython", "ipython", "assistant"]  # fmt: skip


def test_parts_of_text_are_joined_and_others_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert read([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]
    with pytest.raises(RowError) as caught:
        read([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
    assert caught.value.key == "messages[0].content[0]"


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1, "b": None}])
def test_calls_of_tools(arguments):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": arguments}]}
    (message,) = read([call])
    assert message["content"] == ""
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def test_thinking_has_a_property_of_its_own():
    entry = {"field_thinking": "thoughts", "template_thinking_key": "reasoning"}
    assert read([{"role": "assistant", "content": "a", "thoughts": "t"}], **entry)[0]["reasoning"] == "t"
    split = read([{"role": "assistant", "content": "<think>\nt\n</think>\n\na"}], split_thinking=True)
    assert split == [{"role": "assistant", "content": "a", "reasoning_content": "t"}]


@pytest.mark.parametrize("tools", ['[{"name": "add", "type": "function"}]', [{"name": "add", "unit": None}]])
def test_tools(tools):
    reader = MessageReader(DatasetSpec(field_tools="known.tools"))
    conversation = reader.conversation(Row(known={"tools": tools}), [])
    assert conversation.tools == [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize("tools", ["[oops", "[" * 100_000, 7, np.bool_(True)])
def test_tools_that_are_none_name_their_key(tools):
    with pytest.raises(RowError) as caught:
        MessageReader(DatasetSpec()).conversation(Row(tools=tools), [])
    assert caught.value.key == "tools"


def test_arguments_of_thousands_of_brackets_stay_text():
    (message,) = read([{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "[" * 100_000}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == "[" * 100_000


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (None, "messages"),
        ({}, "messages"),
        (["x"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "assistant", "content": "", "tool_calls": "x"}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_name_their_key(value, key):
    with pytest.raises(RowError) as caught:
        read(value)
    assert caught.value.key == key


def test_a_mistyped_name_of_the_content_is_answered_with_the_names_that_there_are():
    turn = {"speaker": "human", "text": "hi"}
    with pytest.raises(RowError, match=r"'messages\[0\].txt'.*text, got nothing; the message has speaker, text \("):
        read([turn], message_property_mappings={"role": "speaker", "content": "txt"})
