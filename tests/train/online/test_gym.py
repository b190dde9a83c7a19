"""Whole runs on a Gym, from configs as people have them."""

import socket

import pytest
import yaml

from made_gym import arithmetic_rows, synonym_rows, write_caller, write_rows
from made_gym_server import ChatVllm, FakeGym, agent_of, verdict
from made_runs import metrics_of
from upweight.config import load_config
from upweight.environments.nemo_gym import gym as gym_module
from upweight.errors import UserError
from upweight.processes import free_port
from upweight.train.run import train

# The two forms that the documentation of another trainer gives; only names of files and sizes are put in.
SINGLE_TURN = """
rl: grpo
chat_template: tokenizer_default
trl:
  use_vllm: false
  num_generations: 4
  max_completion_length: 16
  temperature: 0.9
  reward_funcs:
    - axolotl.integrations.nemo_gym.rewards.reward_nemo_gym_verify
plugins:
  - axolotl.integrations.nemo_gym.NemoGymPlugin
nemo_gym_enabled: true
nemo_gym_auto_start: false
nemo_gym_datasets:
  - path: resources_servers/reasoning_gym/data/train_basic_arithmetic.jsonl
    server_name: reasoning_gym
datasets:
  - path: GYM/resources_servers/reasoning_gym/data/train_basic_arithmetic.jsonl
    type: chat_template
    field_messages: responses_create_params.input
    message_field_content: content
    message_field_role: role
"""
MULTI_TURN = """
rl: grpo
chat_template: tokenizer_default
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
trl:
  use_vllm: true
  vllm_mode: server
  vllm_server_host: localhost
  vllm_lora_sync: true
  vllm_sync_interval: 5
  use_data_producer: true
  async_prefetch: true
  num_generations: 4
  max_completion_length: 16
  temperature: 0.8
  reward_funcs:
    - axolotl.integrations.nemo_gym.rewards.reward_env
plugins:
  - axolotl.integrations.nemo_gym.NemoGymPlugin
nemo_gym_enabled: true
nemo_gym_auto_start: false
nemo_gym_multi_turn: true
nemo_gym_verify_timeout: 120
nemo_gym_datasets:
  - path: resources_servers/example_single_tool_call/data/weather_tool_calling.jsonl
    server_name: example_single_tool_call
datasets:
  - path: GYM/resources_servers/example_single_tool_call/data/weather_tool_calling.jsonl
    type: chat_template
    field_messages: responses_create_params.input
    message_field_content: content
    message_field_role: role
vllm:
  gpu_memory_utilization: 0.85
  max_model_len: 2048
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture
def fake():
    server = FakeGym(reasoning_gym="reasoning_gym", example_single_tool_call="example_single_tool_call")
    for instance in server.implementations:
        server.answers[instance, "/seed_session"] = (200, {}, {"set-cookie": "Server=1; path=/"})
        server.answers[instance, "/verify"] = verify
    yield server
    server.close()


def verify(body, _):
    """Longer is better."""
    texts = [part["text"] for item in body["response"]["output"] for part in item.get("content", [])]
    return verdict(len("".join(texts)) / 10, reward_components={"length": float(len(texts)), "calls": 0.5})


def prepared(folder, text: str, model, fake, rows, **keys):
    """A config of one of the two forms, with its rows in a Gym's folder."""
    content = yaml.safe_load(text.replace("GYM", str(folder / "Gym")))
    file = folder / "Gym" / content["nemo_gym_datasets"][0]["path"]
    file.parent.mkdir(parents=True)
    write_rows(file, rows)
    content |= {
        "base_model": str(model), "nemo_gym_dir": str(folder / "Gym"), "nemo_gym_head_port": fake.port, "max_steps": 2,
        "logging_steps": 1, "learning_rate": 1e-3, "output_dir": str(folder / "out"),
        "dataset_prepared_path": str(folder / "prepared"), **keys,
    }  # fmt: skip
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    return config


def steps(folder) -> list[dict]:
    return [line for line in metrics_of(folder / "out") if "reward" in line]


def test_the_single_turn_form_trains(tmp_path, model, fake):
    train(load_config(prepared(tmp_path, SINGLE_TURN, model, fake, arithmetic_rows()), []))
    first, second = steps(tmp_path)
    assert "rewards/reward_env/mean" in first
    assert first["environment/reasoning_gym/reward"] == pytest.approx(first["rewards/reward_env/mean"])
    assert first["environment/masked"] == second["environment/masked"] == 0
    assert len(fake.asked("reasoning_gym", "/verify")) == 8
    # The file that both keys name came up once: four rows, of which each rollout takes one.
    assert len({body["answer"] for body in fake.asked("reasoning_gym", "/seed_session")}) == 2


def test_faults_of_the_gym_mask_samples_and_the_run_goes_on(tmp_path, model, fake, monkeypatch):
    monkeypatch.setattr(gym_module, "RETRY_SECONDS", (0.01,))
    fake.faults["reasoning_gym", "/verify"] = [500, 500, "hang"]
    config = prepared(tmp_path, SINGLE_TURN, model, fake, arithmetic_rows(), nemo_gym_verify_timeout=2)
    train(load_config(config, []))
    first, second = steps(tmp_path)
    masked = first["environment/masked"] + second["environment/masked"]
    assert 1 <= masked <= 3
    assert first["environment/reasoning_gym/masked"] == first["environment/masked"]


def test_a_gym_that_fails_on_everything_stops_the_run(tmp_path, model, fake, monkeypatch):
    monkeypatch.setattr(gym_module, "RETRY_SECONDS", ())
    fake.answers["reasoning_gym", "/verify"] = (500, "KeyError('source_dataset')", {})
    with pytest.raises(UserError, match=r"failed in all 4 episodes.*source_dataset"):
        train(load_config(prepared(tmp_path, SINGLE_TURN, model, fake, arithmetic_rows()), []))


def test_components_are_columns_of_their_own_for_gdpo(tmp_path, model, fake):
    keys = {"rl": "gdpo", "nemo_gym_reward_components": ["length", "calls"]}
    train(load_config(prepared(tmp_path, SINGLE_TURN, model, fake, arithmetic_rows(), **keys), []))
    assert {"rewards/length/mean", "rewards/calls/mean"} <= set(steps(tmp_path)[0])


def test_rows_with_tools_are_played_here(tmp_path, model, fake):
    fake.implementations["synonyms"] = "example_multi_step"
    fake.answers["synonyms", "/seed_session"] = (200, {}, {})
    fake.answers["synonyms", "/verify"] = verify
    fake.answers["synonyms", "/get_synonym_value"] = (200, {"synonym_value": 711}, {})
    fake.answers["synonyms", "/extract_synonym_values"] = (200, {"success": True}, {})
    config = prepared(tmp_path, SINGLE_TURN, model, fake, synonym_rows(), nemo_gym_max_turns=3)
    content = yaml.safe_load(config.read_text())
    content["nemo_gym_datasets"][0]["server_name"] = "example_multi_step"
    content["trl"]["max_completion_length"] = 160
    config.write_text(yaml.safe_dump(content))
    train(load_config(config, []))
    assert max(line["environment/turns_max"] for line in steps(tmp_path)) in (2, 3)
    assert fake.asked("synonyms", "/get_synonym_value") or fake.asked("synonyms", "/extract_synonym_values")


@pytest.mark.parametrize("raw_logps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_multi_turn_form_trains_an_adapter(tmp_path, model, fake, raw_logps):
    fake.agents["weather_agent"] = "example_single_tool_call"
    agent_of(fake, "weather_agent")
    vllm = ChatVllm(model, longest=2048)
    vllm.raw_logps = raw_logps  # as of a server without --logprobs-mode processed_logprobs
    port = free_port()
    fake.policy["policy_base_url"] = f"http://localhost:{port}/v1"
    config = prepared(tmp_path, MULTI_TURN, model, fake, synonym_rows(), nemo_gym_policy_port=port)
    try:
        train(load_config(config, [f"trl.vllm_server_port={vllm.url.rpartition(':')[2]}"]))
    finally:
        vllm.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)
    found = steps(tmp_path)
    assert len(found) == 2
    assert all(line["environment/turns_max"] == 2 and line["environment/masked"] == 0 for line in found)
    assert all(("sampling/importance_sampling_ratio/mean" in line) is not raw_logps for line in found)
    assert {body["model"] for body in vllm.asked("/v1/chat/completions")} <= {
        body["lora_name"] for body in vllm.asked("/v1/load_lora_adapter")
    }
    assert fake.asked("weather_agent", "/run")[0]["responses_create_params"]["tools"]
