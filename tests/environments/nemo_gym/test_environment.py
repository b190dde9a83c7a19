"""Episodes against recorded answers, and against servers that break."""

import asyncio
import logging

import pytest

from made_gym_server import SECRET, FakeGym, exchange, recorded, verdict
from upweight.config.sections.rollout import GymDataset, GymSection
from upweight.environments.episode import ToolCall, Turn
from upweight.environments.nemo_gym import gym as gym_module
from upweight.environments.nemo_gym.gym import NemoGym
from upweight.environments.nemo_gym.servers import GymFault
from upweight.errors import UserError

ROW = {"responses_create_params": {"input": [{"role": "user", "content": "1 + 1"}]}, "answer": "2"}
PREPARED = {"prompt": [{"role": "user", "content": "1 + 1"}], "prompt_ids": [1, 2]}


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch):
    monkeypatch.setattr(gym_module, "RETRY_SECONDS", (0.01, 0.02, 0.02))


@pytest.fixture
def fake():
    server = FakeGym(sums="reasoning_gym", counter_instance="counter")
    for instance in ("sums", "counter_instance"):
        server.answers[instance, "/seed_session"] = (200, {}, {"set-cookie": "Sums___sums=1; path=/"})
    server.answers["sums", "/verify"] = verdict(1.0)
    yield server
    server.close()


def with_gym(fake, work, **keys):
    """What `work` makes of an environment that is started."""
    names = keys.pop("names", ["sums"])
    keys |= {"head_port": fake.port, "server_timeout": 5.0}
    section = GymSection(enabled=True, datasets=[GymDataset(path="x", server_name=name) for name in names], **keys)

    async def run():
        environment = NemoGym(section)
        await environment.start()
        try:
            return await work(environment)
        finally:
            await environment.stop()

    return asyncio.run(run())


def said(text: str, *calls: ToolCall) -> Turn:
    return Turn(text, "" if calls else text, calls, finished=True)


async def played(environment, *turns: Turn, row=None, server="sums"):
    episode = environment.episode()
    opening = await episode.open({**PREPARED, **(row or ROW), "nemo_gym_server": server})
    replies = [await episode.reply(turn) for turn in turns]
    return opening, replies, await episode.outcome()


@pytest.mark.parametrize("name", ["rg_10_verify_right", "rg_11_verify_wrong"])
def test_an_answer_is_verified_as_recorded(fake, name):
    known = exchange(name)["request"]["json"]
    row = {key: value for key, value in known.items() if key != "response"}
    text = known["response"]["output"][0]["content"][0]["text"]
    fake.answers["sums", "/verify"] = recorded(name)
    _, _, outcome = with_gym(fake, lambda environment: played(environment, said(text), row=row))
    (sent,) = fake.asked("sums", "/verify")
    sent["response"] |= {"id": "resp"}
    sent["response"]["output"][0] |= {"id": "msg"}
    assert sent == known
    assert outcome.rewards == {"nemo_gym": exchange(name)["response"]["json"]["reward"]}
    assert outcome.details["task_name"] == "knights_knaves"
    assert fake.asked("sums", "/seed_session") == [row]


def test_tools_are_called_in_the_session_of_the_rollout(fake):
    row = exchange("session_00_seed")["request"]["json"]
    names = {
        "/seed_session": "session_00_seed",
        "/increment_counter": "session_01_increment",
        "/get_counter_value": "session_02_get",
        "/verify": "session_03_verify_with_cookie",
    }
    fake.answers |= {("counter_instance", path): recorded(name) for path, name in names.items()}

    async def work(environment):
        calls = ToolCall("increment_counter", {"count": 3}), ToolCall("get_counter_value", {})
        return await played(environment, said("", *calls), said("6"), row=row, server="counter")

    opening, (reply, last), outcome = with_gym(fake, work)
    assert [tool["function"]["name"] for tool in opening.tools] == ["increment_counter", "get_counter_value"]
    assert [message["content"] for message in reply.messages] == ['{"success": true}', '{"count": 6}']
    assert not last.messages
    assert outcome.rewards == {"nemo_gym": 1.0}
    cookie = next(iter(exchange("session_01_increment")["request"]["cookies"].values()))
    assert all(cookie in cookies for _, path, _, cookies in fake.seen if path != "/seed_session")
    kinds = [item["type"] for item in fake.asked("counter_instance", "/verify")[0]["response"]["output"]]
    assert kinds == ["function_call", "function_call", "function_call_output", "function_call_output", "message"]


def test_rollouts_do_not_share_cookies(fake):
    sessions = iter(range(100))
    fake.answers["sums", "/seed_session"] = lambda *_: (200, {}, {"set-cookie": f"Sums={next(sessions)}; path=/"})

    async def work(environment):
        await asyncio.gather(*(played(environment, said("2")) for _ in range(8)))

    with_gym(fake, work)
    seeds = [cookies for _, path, _, cookies in fake.seen if path == "/seed_session"]
    verified = [cookies for _, path, _, cookies in fake.seen if path == "/verify"]
    assert seeds == [""] * 8
    assert sorted(verified) == [f"Sums={n}" for n in range(8)]


def test_errors_of_tools_are_the_policys_to_read(fake):
    fake.answers["sums", "/look_up"] = recorded("tool_02_get_weather_bad_args")
    fake.answers["sums", "/crash"] = (500, "KeyError('x')", {})
    calls = [
        ToolCall("look_up", {"town": "x"}),
        ToolCall("nothing_of_that_name", {}),
        ToolCall("../verify", {}),
        ToolCall("look_up", {}, error="no JSON"),
        ToolCall("crash", {}),
    ]
    _, (reply,), outcome = with_gym(fake, lambda environment: played(environment, said("", *calls)))
    texts = [message["content"] for message in reply.messages]
    assert "Field required" in texts[0]
    assert texts[1:3] == ['{"detail": "Not Found"}', '{"detail":"Not Found"}']
    assert texts[3:] == ["error: no JSON", "\"KeyError('x')\""]
    assert reply.failed == 5
    items = fake.asked("sums", "/verify")[0]["response"]["output"]
    assert [item["arguments"] for item in items if item["type"] == "function_call"][3] == "{}"
    assert outcome.rewards == {"nemo_gym": 1.0}


def test_turns_end_where_the_config_says(fake):
    fake.answers["sums", "/look_up"] = (200, {}, {})
    turn = said("", ToolCall("look_up", {}))
    _, replies, _ = with_gym(fake, lambda e: played(e, turn, turn), max_turns=2)
    assert [bool(reply.messages) for reply in replies] == [True, False]
    assert len(fake.asked("sums", "/look_up")) == 2


@pytest.mark.parametrize(
    "answer",
    [
        recorded("fail_04_no_source_dataset"),
        (422, {"detail": []}, {}),
        (200, "a text", {}),
        (200, {"reward": None}, {}),
        (200, {"reward": float("nan")}, {}),
        verdict(0.0, _ng_failure_class="judge_failed"),
        verdict(0.0, mask_sample=True, failure_reason="the judge is away"),
    ],
)
def test_what_says_nothing_about_the_policy_is_no_reward(fake, answer):
    fake.answers["sums", "/verify"] = answer
    with pytest.raises(GymFault):
        with_gym(fake, lambda environment: played(environment, said("2")))


def test_faults_that_pass_are_asked_again(fake):
    fake.faults["sums", "/seed_session"] = [503, "drop"]
    fake.faults["sums", "/verify"] = [500, "drop", 502]
    _, _, outcome = with_gym(fake, lambda environment: played(environment, said("2")))
    assert outcome.rewards == {"nemo_gym": 1.0}


def test_a_call_that_may_have_had_an_effect_is_not_made_twice(fake):
    fake.answers["sums", "/add"] = (200, {}, {})
    fake.faults["sums", "/add"] = ["drop"]
    with pytest.raises(GymFault):
        with_gym(fake, lambda environment: played(environment, said("", ToolCall("add", {}))))
    assert len(fake.asked("sums", "/add")) == 1


def test_an_answer_that_hangs_its_server_is_not_sent_again(fake):
    fake.faults["sums", "/verify"] = ["hang"]
    with pytest.raises(GymFault, match="no answer within"):
        with_gym(fake, lambda environment: played(environment, said("9**9**9")), verify_timeout=0.3)
    assert len(fake.asked("sums", "/verify")) == 1


def test_a_session_that_was_lost_before_anything_happened_is_begun_anew(fake):
    fake.faults["sums", "/verify"] = ["drop"]

    async def work(environment):
        fake.life = 2  # started anew, which is found out at the first fault
        return await played(environment, said("2"))

    _, _, outcome = with_gym(fake, work)
    assert outcome.rewards == {"nemo_gym": 1.0}
    assert len(fake.asked("sums", "/seed_session")) == 2


def test_a_session_that_was_lost_after_calls_is_a_fault(fake):
    fake.answers["sums", "/add"] = (200, {}, {})
    fake.faults["sums", "/verify"] = ["drop"]

    async def work(environment):
        fake.life = 2
        return await played(environment, said("", ToolCall("add", {})))

    with pytest.raises(GymFault, match="was restarted in between"):
        with_gym(fake, work)


def test_components_become_rewards_of_their_own(fake):
    fake.answers["sums", "/verify"] = verdict(1.5, reward_components={"right": 1.0, "form": 0.5})
    keys = {"reward_components": ["form", "right"]}
    _, _, outcome = with_gym(fake, lambda environment: played(environment, said("2")), **keys)
    assert outcome.rewards == {"form": 0.5, "right": 1.0}
    fake.answers["sums", "/verify"] = verdict(1.5)
    with pytest.raises(GymFault, match="no reward component form, right"):
        with_gym(fake, lambda environment: played(environment, said("2")), **keys)


def test_names_are_of_instances_implementations_and_agents(fake):
    fake.agents["sums_agent"] = "sums"
    row = {**ROW, "agent_ref": {"type": "responses_api_agents", "name": "sums_agent"}}
    for server in ("sums", "reasoning_gym", "sums_agent", None):
        with_gym(fake, lambda environment, name=server: played(environment, said("2"), row=row, server=name))
    assert len(fake.asked("sums", "/verify")) == 4
    with pytest.raises(UserError, match=r"no server 'sumz'.*Did you mean 'sums'"):
        with_gym(fake, lambda environment: played(environment, said("2")), names=["sumz"])


def test_a_gym_that_is_not_there_is_told_of():
    section = GymSection(enabled=True, head_port=9, server_timeout=0.2)
    with pytest.raises(UserError, match="nemo_gym_head_port"):
        asyncio.run(NemoGym(section).start())


def test_keys_of_the_head_are_never_shown(fake, caplog):
    caplog.set_level(logging.DEBUG)
    fake.agents["sums_agent"] = "sums"
    fake.answers["sums", "/verify"] = (500, "broken", {})

    async def work(environment):
        shown = repr(environment.servers)
        with pytest.raises(GymFault) as caught:
            await played(environment, said("2"))
        return shown + str(caught.value)

    assert SECRET not in with_gym(fake, work) + caplog.text
