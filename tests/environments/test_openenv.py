"""OpenEnv episodes against a small server that gives recorded answers."""

import asyncio

import pytest

from made_gym_server import wait_until
from made_openenv import BAD_GUESS, GUESS, HANG_UP, MCP, MOVE, FakeOpenEnv, failed, observed
from upweight.environments.episode import ToolCall, Turn
from upweight.environments.openenv import OpenEnv, OpenEnvFault
from upweight.errors import UserError

RESET = observed({"metadata": {}, "hint": "guess a number in [1,20]", "remaining": 7}, 0.0)
LOWER = observed({"metadata": {}, "hint": "lower", "remaining": 6}, 0.25)
CORRECT = observed({"metadata": {}, "hint": "correct", "remaining": 5}, 1.0, True)
TASK = {"type": "observation", "data": {"observation": {"metadata": {"task": "what is 4+5?"}}, "reward": 0.0}}
SCHEMA = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
TOOLS = observed({"metadata": {}, "tools": [{"name": "add", "description": "Add", "input_schema": SCHEMA}]})
NINE = {"content": [{"type": "text", "text": "9", "meta": None}], "data": 9, "is_error": False}


@pytest.fixture
def serving():
    servers = []

    def start(*args, **options):
        servers.append(FakeOpenEnv(*args, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def said(text="", *calls):
    return Turn(text, text, calls, finished=True)


def called(name, **arguments):
    return said("", ToolCall(name, arguments))


def played(url, *turns, row=None, **options):
    """Opening, replies and outcome of one episode."""

    async def play():
        environment = OpenEnv(url, **{"timeout": 5.0, "wait": 5.0, **options})
        await environment.start()
        episode = environment.episode()
        try:
            opening = await episode.open({"prompt": "Play."} if row is None else row)
            replies = [await episode.reply(turn) for turn in turns]
            return opening, replies, await episode.outcome()
        finally:
            await episode.close()
            await environment.stop()

    return asyncio.run(play())


def test_the_only_field_of_an_action_is_filled_with_what_the_policy_writes(serving):
    server = serving(GUESS, [RESET, BAD_GUESS, LOWER, CORRECT])
    opening, replies, outcome = played(server.url, said("x"), said(" 10\n"), said("5"))
    assert opening.messages == [
        {"role": "user", "content": 'Play.\n\n{"hint": "guess a number in [1,20]", "remaining": 7}'}
    ]
    assert not opening.tools
    assert replies[0].messages == [{"role": "user", "content": "error: guess: Input should be a valid integer"}]
    assert replies[1].messages == [{"role": "user", "content": '{"hint": "lower", "remaining": 6}'}]
    assert not replies[2].messages
    assert outcome.rewards == {"openenv": 1.25}
    assert outcome.details == {"step_rewards": [0.25, 1.0], "steps": 2, "done": True}
    sent = server.received[0]
    assert sent[0] == {"type": "reset", "data": {}}
    assert sent[2] == {"type": "step", "data": {"guess": "10"}}
    wait_until(lambda: sent[-1] == {"type": "close"})


@pytest.mark.parametrize(("how", "expected"), [("sum", 1.25), ("last", 1.0), ("mean", 0.625), ("max", 1.0)])
def test_rewards_of_steps_are_put_together_as_asked(serving, how, expected):
    server = serving(GUESS, [RESET, LOWER, observed({"hint": "?"}), CORRECT])
    _, _, outcome = played(server.url, said("1"), said("2"), said("3"), reward=how)
    assert outcome.rewards == {"openenv": expected}


def test_an_episode_without_any_reward_earns_nothing(serving):
    _, _, outcome = played(serving(GUESS, [RESET]).url)
    assert outcome.rewards == {"openenv": 0.0}


@pytest.mark.parametrize(
    ("columns", "expected"), [(None, {"seed": 3, "level": "hard"}), (["seed"], {"seed": 3}), ([], {})]
)
def test_columns_of_the_row_reach_reset(serving, columns, expected):
    server = serving(GUESS, [RESET])
    row = {"prompt": "Play.", "prompt_ids": [1, 2], "seed": 3, "level": "hard", "empty": None}
    played(server.url, row=row, columns=columns)
    assert server.received[0][0] == {"type": "reset", "data": expected}


def test_a_column_that_is_not_there_is_named(serving):
    with pytest.raises(UserError, match=r"environment\.columns.*seed"):
        played(serving(GUESS, [RESET]).url, columns=["seed"])


def test_several_fields_become_a_tool(serving):
    server = serving(MOVE, [observed({"board": "..."}), observed({"board": "x.."}, 0.5), observed({}, 1.0, True)])
    opening, replies, outcome = played(
        server.url, called("step", row=1, way="up"), called("jump"), called("step", row=2), row={"prompt": ""}
    )
    function = opening.tools[0]["function"]
    assert (function["name"], function["description"]) == ("step", "Move a piece.")
    assert function["parameters"] == {
        "type": "object", "properties": {"row": {"type": "integer"}, "way": {"$ref": "#/$defs/Way"}},
        "required": ["row"], "$defs": {"Way": {"enum": ["up", "down"]}},
    }  # fmt: skip
    assert opening.messages == [{"role": "user", "content": "..."}]
    assert replies[0].messages == [{"role": "tool", "name": "step", "content": "x.."}]
    assert "no tool 'jump'" in replies[1].messages[0]["content"]
    assert not replies[2].messages
    assert outcome.rewards == {"openenv": 1.5}
    assert server.received[0][1] == {"type": "step", "data": {"row": 1, "way": "up"}}


def test_a_text_field_can_be_named(serving):
    server = serving(MOVE, [RESET, CORRECT])
    opening, _, _ = played(server.url, said("up"), text_field="way")
    assert not opening.tools
    assert server.received[0][1] == {"type": "step", "data": {"way": "up"}}
    with pytest.raises(UserError, match=r"environment\.text_field.*'place'.*row, way"):
        played(server.url, text_field="place")


def test_an_observed_field_can_be_named(serving):
    server = serving(GUESS, [RESET, LOWER])
    opening, replies, _ = played(server.url, said("1"), observation="hint")
    assert opening.messages[0]["content"] == "Play.\n\nguess a number in [1,20]"
    assert replies[0].messages[0]["content"] == "lower"
    with pytest.raises(UserError, match=r"environment\.observation.*'hin'.*hint, remaining"):
        played(server.url, observation="hin")


def test_mcp_tools_are_called_by_step_so_that_rewards_count(serving):
    wrong = {"error_type": "invalid_args", "message": "a: not a number"}
    answers = [
        TASK, TOOLS, observed({"tool_name": "add", "result": NINE, "error": None}),
        observed({"tool_name": "add", "result": None, "error": wrong}),
        observed({"tool_name": "submit", "result": {"data": "ok"}, "error": None}, 1.0, True),
    ]  # fmt: skip
    server = serving(MCP, answers)
    turn = said("", ToolCall("add", {"a": 4}, id="c1"), ToolCall("add", {"a": "x"}), ToolCall("ad", {}, error="unread"))
    opening, replies, outcome = played(server.url, turn, called("submit", answer=9))
    assert opening.messages[0]["content"] == "Play.\n\nwhat is 4+5?"
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    assert opening.tools[0]["function"]["parameters"] == SCHEMA
    assert replies[0].messages == [
        {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "9"},
        {"role": "tool", "name": "add", "content": "error: a: not a number"},
        {"role": "tool", "name": "ad", "content": "error: unread"},
    ]
    assert replies[0].failed == 2
    assert not replies[1].messages
    assert outcome.rewards == {"openenv": 1.0}
    assert server.received[0][2]["data"] == {"type": "call_tool", "tool_name": "add", "arguments": {"a": 4}}


def test_a_turn_without_a_call_ends_the_episode(serving):
    _, replies, outcome = played(serving(MCP, [TASK, TOOLS]).url, said("9, I think"))
    assert not replies[0].messages
    assert outcome.rewards == {"openenv": 0.0}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (failed("EXECUTION_ERROR"), "env bug"),
        (failed("SESSION_ERROR"), "SESSION_ERROR"),
        (HANG_UP, "connection was lost"),
        ([1, 2], "no OpenEnv message"),
    ],
)
def test_what_the_environment_does_wrong_is_raised(serving, answer, message):
    with pytest.raises(OpenEnvFault, match=message):
        played(serving(GUESS, [RESET, answer]).url, said("1"))


def test_a_tool_that_times_out_is_the_environments_fault(serving):
    late = observed({"tool_name": "add", "result": None, "error": {"error_type": "timeout", "message": "30 s"}})
    with pytest.raises(OpenEnvFault, match="timeout"):
        played(serving(MCP, [TASK, TOOLS, late]).url, called("add", a=1))


def test_a_slow_step_is_not_waited_for_longer_than_its_limit(serving):
    server = serving(GUESS, [RESET])
    server.delay = 1.0
    with pytest.raises(OpenEnvFault, match=r"no answer to .reset. within 0\.1 seconds"):
        played(server.url, timeout=0.1)


def test_a_refused_reset_masks_the_sample(serving):
    with pytest.raises(OpenEnvFault, match="reset was refused"):
        played(serving(GUESS, [BAD_GUESS]).url)


def test_a_server_that_hangs_up_at_reset_is_asked_again(serving):
    server = serving(GUESS, [HANG_UP], [RESET, CORRECT])
    _, _, outcome = played(server.url, said("1"))
    assert outcome.rewards == {"openenv": 1.0}
    assert server.connections == 2


def test_a_full_server_is_waited_for_and_the_remedy_named(serving, caplog, monkeypatch):
    monkeypatch.setattr("upweight.log._warned", set())
    server = serving(GUESS, [RESET, CORRECT], sessions=2)
    server.delay = 0.02

    async def all_of_them():
        environment = OpenEnv(server.url, timeout=5.0, wait=60.0)
        await environment.start()

        async def one():
            episode = environment.episode()
            await episode.open({"prompt": "Play."})
            await episode.reply(said("1"))
            await episode.close()
            return (await episode.outcome()).rewards["openenv"]

        return await asyncio.gather(*(one() for _ in range(9)))

    assert asyncio.run(all_of_them()) == [1.0] * 9
    assert server.most == 2
    assert server.connections == 9
    assert caplog.text.count("max_concurrent_envs") == 1


def test_a_full_server_is_given_up_on_after_the_limit(serving):
    with pytest.raises(OpenEnvFault, match=r"no session within 0\.2 seconds"):
        played(serving(GUESS, [RESET], sessions=0).url, wait=0.2)


def test_no_server_or_another_kind_of_server_is_said_before_training(serving):
    server = serving({}, [RESET])
    with pytest.raises(UserError, match="no OpenEnv server: /schema"):
        played(server.url)
    server.close()
    with pytest.raises(UserError, match=r"no OpenEnv server answers at .* after 0.1 seconds"):
        played(server.url, wait=0.1)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:8000/", "ws://127.0.0.1:8000/ws"])
def test_an_address_may_be_written_in_several_ways(url):
    server = OpenEnv(url)
    assert (server.url, server.socket) == ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/ws")


def test_an_address_below_a_path_keeps_it():
    server = OpenEnv("https://host.example/games/one")
    assert (server.url, server.socket) == ("https://host.example/games/one", "wss://host.example/games/one/ws")
    with pytest.raises(UserError, match=r"environment\.url"):
        OpenEnv("file:///tmp")
