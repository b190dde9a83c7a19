"""What agents were recorded to return, as turns."""

import copy

import httpx
import pytest

from made_gym_server import exchange
from upweight.environments.nemo_gym.responses import is_finished, messages_of, turns_of, verification_of
from upweight.environments.nemo_gym.servers import GymFault

RUNS = ["run_11_single_tool_call_return_token_ids", "wheel_040_tool_run", "wheel_070_tool_run"]


def found(name: str) -> dict:
    return exchange(name)["response"]["json"]


@pytest.mark.parametrize("name", RUNS)
def test_turns_are_those_items_that_carry_tokens(name):
    first, second = turns_of(found(name))
    assert bytes(token for token in second.ids if token < 256).decode().startswith("It is cold there")
    assert len(first.ids) == len(first.logps)
    assert second.prompt[: len(first.prompt)] == first.prompt
    roles = [message["role"] for message in messages_of(found(name))]
    assert roles == ["assistant", "tool", "assistant"]
    assert messages_of(found(name))[0]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert is_finished(found(name))


def test_a_rollout_without_token_ids_is_a_fault():
    overflow = found("run_31_context_overflow")
    assert not is_finished(overflow)
    with pytest.raises(GymFault, match="no token ids"):
        turns_of(overflow)


@pytest.mark.parametrize(
    ("key", "value"),
    [("generation_log_probs", [-0.1]), ("prompt_token_ids", []), ("generation_token_ids", [])],
)
def test_tokens_that_do_not_fit_together_are_a_fault(key, value):
    broken = copy.deepcopy(found(RUNS[0]))
    broken["response"]["output"][0][key] = value
    with pytest.raises(GymFault, match="a turn has"):
        turns_of(broken)


def test_arguments_that_are_no_json_stay_text():
    broken = copy.deepcopy(found(RUNS[0]))
    call = next(item for item in broken["response"]["output"] if item.get("type") == "function_call")
    call["arguments"] = "[" * 5000
    assert messages_of(broken)[0]["tool_calls"][0]["function"]["arguments"] == {"text": "[" * 5000}


def test_a_verification_of_thousands_of_brackets_is_a_fault():
    answer = httpx.Response(200, content=b"[" * 5000, request=httpx.Request("POST", "http://x/verify"))
    with pytest.raises(GymFault, match="/verify"):
        verification_of(answer)


def test_an_answer_without_output_is_a_fault():
    with pytest.raises(GymFault, match="no output"):
        turns_of({"reward": 1.0})
