"""What a request of OpenAI's API means, and which fields are refused by name."""

import pytest

from upweight.inference.endpoint.requests import BadRequest, read_request

ASKED = {"messages": [{"role": "user", "content": "hello"}]}


def test_fields_become_sampling():
    body = ASKED | {"temperature": 0, "top_p": 0.5, "seed": 3, "stop": "x", "max_tokens": 7, "top_k": -1, "user": "me"}
    read = read_request(body, {"temperature": 0.7}, chat=True)
    sampling = read.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop_strings) == (0, 0.5, 3, ("x",))
    assert (read.max_tokens, read.count, read.stream, sampling.top_k) == (7, 1, False, 0)
    assert read_request(ASKED, {"temperature": 0.7, "max_tokens": None}, chat=True).sampling.temperature == 0.7
    assert read_request(ASKED | {"max_completion_tokens": 5, "max_tokens": 9}, {}, chat=True).max_tokens == 5


def test_parts_of_text_are_joined_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]}
    assert read_request(body, {}, chat=True).prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 2, "stream": True}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": [1]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(change, field):
    with pytest.raises(BadRequest) as raised:
        read_request(ASKED | change, {}, chat=True)
    assert raised.value.field == field


def test_neutral_values_are_taken():
    read_request(ASKED | {"tools": [], "logprobs": False, "response_format": {"type": "text"}}, {}, chat=True)
