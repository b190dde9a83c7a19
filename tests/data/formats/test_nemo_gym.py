"""Rows of NeMo Gym as prompts."""

import pytest

from made_gym_server import exchange
from made_tokenizers import encoder
from upweight.data.formats.nemo_gym import HIDDEN_COLUMN, SERVER, row_of, tools_of
from upweight.data.raw_row import RowError

ENTRY = {"type": "nemo_gym", "server_name": "sums"}


def made(row, **entry):
    (record,) = encoder({**ENTRY, **entry}, rl="grpo", chat_template="chatml")(row)
    return record


def test_messages_of_all_roles_are_kept():
    row = exchange("wheel_070_tool_run")["request"]["json"]
    columns = made(row).columns
    assert [message["role"] for message in columns["prompt"]] == ["system", "user"]  # a developer's is a system turn
    assert columns["prompt"][1]["content"] == "what's it like in sf?"
    assert columns[SERVER] == "sums"
    (tool,) = tools_of(columns)
    assert tool["function"]["name"] == "get_weather"
    assert "strict" not in tool["function"]
    assert row_of(columns) == row


def test_input_may_be_text_with_instructions():
    row = {"responses_create_params": {"input": "1 + 1", "instructions": "Be brief."}, "answer": "2"}
    columns = made(row).columns
    assert columns["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1"},
    ]
    assert columns["answer"] == "2"
    assert row_of(columns) == row


def test_earlier_calls_and_what_came_of_them_are_turns():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "and "}, {"type": "input_text", "text": "now?"}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"key": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ]
    prompt = made({"responses_create_params": {"input": items}}).columns["prompt"]
    assert [message["role"] for message in prompt] == ["user", "assistant", "tool"]
    assert prompt[0]["content"] == "and now?"
    function = prompt[1]["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("get", {"key": 1})


def test_what_a_row_holds_under_our_names_is_not_lost():
    row = {"responses_create_params": {"input": "hi"}, "prompt": "verbatim", "seed": 0, "tags": []}
    columns = made(row).columns
    assert columns["prompt"] == [{"role": "user", "content": "hi"}]
    assert columns[HIDDEN_COLUMN] == {"prompt": "verbatim"}
    assert row_of(columns) == row


@pytest.mark.parametrize(
    "row", [{}, {"responses_create_params": {}}, {"responses_create_params": {"input": [{"type": "image"}]}},
            {"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}]
)  # fmt: skip
def test_a_row_that_asks_nothing_is_an_error(row):
    with pytest.raises(RowError):
        made(row)
