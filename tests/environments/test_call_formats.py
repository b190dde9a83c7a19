"""Tool calls out of text, well written and not."""

import pytest

from made_players import tokenizer_for
from upweight.environments.call_formats import call_format_of, parse_calls

CALL = '{"name": "look", "arguments": {"key": "x", "n": 2}}'
MADE = [("look", {"key": "x", "n": 2})]


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", f"so\n<tool_call>\n{CALL}\n</tool_call>", "so"),
        ("hermes", f"<tool_call>{CALL}</tool_call> and", "and"),
        ("hermes", '<tool_call>{"name": "look", "arguments": "{\\"key\\": \\"x\\", \\"n\\": 2}"}</tool_call>', ""),
        ("llama3", CALL.replace("arguments", "parameters"), ""),
        ("llama3", f"<|python_tag|>{CALL}", ""),
        ("json", f"I call\n```json\n{CALL}\n```", "I call"),
        ("json", f"  {CALL}", ""),
    ],
)
def test_a_call_is_found_and_taken_out(form, text, content):
    said, calls = parse_calls(text, form)
    assert [(call.name, call.arguments) for call in calls] == MADE
    assert calls[0].error is None
    assert said == content


def test_several_calls_keep_their_order():
    other = CALL.replace("look", "see")
    for form, text in (
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{other}</tool_call>"),
        ("hermes", f"<tool_call>[{CALL}, {other}]</tool_call>"),
        ("llama3", f"{CALL}; {other}"),
        ("json", f"{CALL}\n{other}"),
    ):
        assert [call.name for call in parse_calls(text, form)[1]] == ["look", "see"]


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("hermes", "<tool_call>{oops}</tool_call>", "the call is no JSON"),
        ("hermes", f"<tool_call>{CALL}", "no closing </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "the arguments are no object"),
        ("hermes", '<tool_call>{"name": "look", "arguments": "key=x"}</tool_call>', "the arguments are no JSON"),
        ("hermes", "<tool_call>7</tool_call>", "names no tool"),
        ("llama3", '{"name": "look", "parameters": {', "the call is no JSON"),
        ("llama3", "<|python_tag|>look(x)", "the call is no JSON"),
        ("json", '{"name": "look", "arguments": {"key": }', "the call is no JSON"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "the call is no JSON"),
        ("hermes", f'<tool_call>{{"name": "look", "arguments": "{"[" * 100_000}"}}</tool_call>', "are no JSON"),
        ("llama3", f"<|python_tag|>{'[' * 100_000}", "the call is no JSON"),
        ("json", f'{{"name": "look", "arguments": {"[" * 100_000}', "the call is no JSON"),
    ],
)
def test_a_call_that_is_not_well_written_says_why(form, text, error):
    (call,) = parse_calls(text, form)[1]
    assert error in call.error


@pytest.mark.parametrize("form", ["hermes", "llama3", "json"])
@pytest.mark.parametrize("text", ["just words", "a {brace} and {more", '{"answer": 7}', "", '{"name": "Ada"}!'])
def test_plain_text_is_left_alone(form, text):
    said, calls = parse_calls(text, form)
    assert said == text
    assert calls == []


def test_the_format_goes_by_the_chat_template():
    assert call_format_of(tokenizer_for("qwen3").chat_template) == "hermes"
    assert call_format_of("... <|python_tag|> ...") == "llama3"
    assert call_format_of(tokenizer_for("chatml").chat_template) == "json"
