"""Rollouts that a Gym's agents drive, through the gateway to a served policy."""

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from made_gym import write_caller
from made_gym_server import ChatVllm, FakeGym, agent_of, recorded
from upweight.config.sections.rollout import GymDataset, GymSection
from upweight.environments.nemo_gym.gym import NemoGym
from upweight.errors import UserError
from upweight.processes import free_port
from upweight.rollout.episodes.gym_agents import GymAgents, PolicyGateway
from upweight.rollout.vllm.server import VllmServer
from upweight.types import Group, Sampling

ROW = {
    "prompt": [{"role": "user", "content": "go on"}],
    "prompt_ids": [1],
    "responses_create_params": {"input": [{"role": "user", "content": "go on"}]},
    "nemo_gym_server": "sums",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture
def vllm(folder):
    server = ChatVllm(folder)
    yield server
    server.close()


@pytest.fixture
def fake():
    server = FakeGym(sums="sums")
    server.agents["sums_agent"] = "sums"
    yield server
    server.close()


@pytest.fixture
def policy(folder):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.fixture
def agents(fake, vllm, policy, folder, tmp_path):
    made = []

    def make(temperature: float = 1.0, **keys) -> GymAgents:
        options = {"dtype": torch.float32, "folder": tmp_path / "vllm", "timeout": 5.0, "temperature": temperature}
        server = VllmServer(vllm.url, policy, AutoTokenizer.from_pretrained(folder), **options)
        server.sync(3)
        gateway = PolicyGateway(server, free_port(), {})
        fake.policy["policy_base_url"] = gateway.url
        keys |= {"head_port": fake.port, "server_timeout": 5.0}
        section = GymSection(enabled=True, multi_turn=True, datasets=[GymDataset(path="x", server_name="sums")], **keys)
        made.append(GymAgents(NemoGym(section), gateway))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rolled(completion_source: GymAgents, groups: int = 2, count: int = 2) -> list[Group]:
    made = [Group(number, ROW, [1]) for number in range(groups)]
    completion_source(made, count, Sampling(5, temperature=0.8), None)
    return made


def test_every_written_token_has_the_log_prob_that_the_policy_gives_it(agents, fake, vllm, policy):
    agent_of(fake, "sums_agent")
    groups = rolled(agents())
    asked = vllm.asked("/v1/chat/completions")
    assert {body["model"] for body in asked} == {vllm.asked("/v1/load_lora_adapter")[-1]["lora_name"]}
    assert all(body["temperature"] == 0.8 and body["max_tokens"] == 5 for body in asked)
    for group in groups:
        for one in group.completions:
            assert one.failure is None
            assert not one.earlier
            assert one.versions == [3] * len(one.ids)
            assert one.sampled is not None
            ids, scored = [*group.prompt_ids, *one.ids], [False] * len(group.prompt_ids) + one.sampled
            logits = policy(input_ids=torch.tensor([ids])).logits[0, :-1] / 0.8
            own = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            said = torch.tensor([0.0] * len(group.prompt_ids) + one.logps)[1:]
            kept = torch.tensor(scored[1:])
            torch.testing.assert_close(own[kept], said[kept], atol=1e-4, rtol=0)
            assert kept.sum() > 1
    assert [episode["turns"] for episode in groups[0].extras["episode"]] == [2, 2]
    assert groups[0].extras["nemo_gym_server"] == ["sums", "sums"]
    assert groups[0].extras["episode"][0]["rewards"]["nemo_gym"] > 0


def test_log_probs_without_the_temperature_are_not_taken_for_the_policys(agents, fake, vllm):
    vllm.raw_logps = True
    agent_of(fake, "sums_agent")
    for group in rolled(agents(temperature=0.8)):
        assert all(one.failure is None and one.logps == [] and set(one.versions) == {3} for one in group.completions)


def test_turns_have_the_version_that_wrote_them(agents, fake):
    completion_source = agents()
    server = completion_source.gateway.server
    agent_of(fake, "sums_agent", between=lambda: server.sync(server.version() + 1))
    (group,) = rolled(completion_source, groups=1, count=1)
    (one,) = group.completions
    read = one.sampled.index(False)  # behind the first turn
    assert set(one.versions[:read]) == {3}
    assert {version for version, own in zip(one.versions[read:], one.sampled[read:], strict=True) if own} == {4}


def test_a_history_that_is_written_otherwise_splits_the_sequence(agents, fake):
    agent_of(fake, "sums_agent", rewrites=True)
    (group,) = rolled(agents(), groups=1)
    for one in group.completions:
        assert len(one.earlier) == 1
        assert all(any(part.sampled or ()) for part in (one, *one.earlier))
    assert group.extras["episode"][0]["splits"] == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (recorded("run_31_context_overflow"), "no token ids"),
        (recorded("run_32_upstream_500"), "500"),
        ((200, {"reward": 1.0}, {}), "no output"),
    ],
)
def test_a_rollout_that_broke_is_masked_and_the_others_are_not(agents, fake, answer, reason):
    agent_of(fake, "sums_agent", turns=1)
    whole, asked = fake.answers["sums_agent", "/run"], []

    def run(body, cookies):
        asked.append(body)
        return answer if len(asked) == 1 else whole(body, cookies)

    fake.answers["sums_agent", "/run"] = run
    (group,) = rolled(agents(), groups=1, count=3)
    failures = [one.failure for one in group.completions]
    assert sum(failure is not None for failure in failures) == 1
    assert reason in next(failure for failure in failures if failure is not None)


@pytest.mark.parametrize(
    "keys", [{"run_timeout": 1.0}, {"verify_timeout": 1.0}, {"run_timeout": 1.0, "verify_timeout": 9.0}]
)
def test_a_rollout_that_hangs_ends_at_its_limit(agents, fake, keys):
    agent_of(fake, "sums_agent", turns=1)
    fake.faults["sums_agent", "/run"] = ["hang"]
    (group,) = rolled(agents(**keys), groups=1, count=1)
    assert "no answer within 1 seconds" in (group.completions[0].failure or "")


def test_more_turns_than_allowed_are_no_rollout(agents, fake):
    agent_of(fake, "sums_agent", turns=3)
    (group,) = rolled(agents(max_turns=2), groups=1, count=1)
    assert "nemo_gym_max_turns" in (group.completions[0].failure or "")


def test_a_gym_that_asks_another_model_is_refused(agents, fake, vllm):
    agent_of(fake, "sums_agent")
    completion_source = agents()
    fake.policy["policy_base_url"] = f"{vllm.url}/v1"
    with pytest.raises(UserError, match=r"adapters have a new name.*policy_base_url=http"):
        rolled(completion_source)
    fake.policy["policy_base_url"] = "http://127.0.0.1:9/v1"
    with pytest.raises(UserError, match="where the policy is not"):
        rolled(agents_again(completion_source))


def test_a_proxy_with_a_fixed_address_is_refused_with_the_argument_that_changes_it(agents, fake, vllm):
    agent_of(fake, "sums_agent")
    completion_source = agents()
    proxy = {"base_url": f"{vllm.url}/v1", "model": "the base"}
    fake.policy["policy_model"] = {"responses_api_models": {"vllm_model": proxy}}
    argument = rf"\+\+policy_model\.responses_api_models\.vllm_model\.base_url={completion_source.gateway.url}"
    with pytest.raises(UserError, match=rf"vLLM for 'the base'.*{argument}"):
        rolled(completion_source)


def agents_again(completion_source: GymAgents) -> GymAgents:
    completion_source.close()
    return completion_source


def test_what_the_server_refuses_reaches_the_gym_as_it_is_and_the_log(agents, vllm, caplog):
    completion_source = agents()
    assert completion_source.gateway is not None
    completion_source.gateway.open()
    vllm.faults["/v1/chat/completions"] = [400]
    answer = httpx.post(f"{completion_source.gateway.url}/chat/completions", json={"messages": []}, trust_env=False)
    assert answer.status_code == 400
    assert "refuses a request of the Gym's agents: 400: as was asked" in caplog.text
    assert httpx.post(f"{completion_source.gateway.url}/elsewhere", json={}, trust_env=False).status_code == 404
    assert httpx.get(f"{completion_source.gateway.url}/models", trust_env=False).json()["data"]
    assert (
        httpx.post(f"{completion_source.gateway.url}/chat/completions", content=b"{", trust_env=False).status_code
        == 400
    )
