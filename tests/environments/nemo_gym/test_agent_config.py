"""The config that agents are started with."""

import yaml

from upweight.config.sections.rollout import GymSection
from upweight.environments.nemo_gym.agent_config import agent_config


def test_the_three_parts_name_each_other():
    found = yaml.safe_load(agent_config("workplace_assistant", instance="office", max_turns=4))
    agent = found["office_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"]["name"] == "office"
    assert agent["max_steps"] == 4
    assert "workplace_assistant" in found["office"]["resources_servers"]
    proxy = found[agent["model_server"]["name"]]["responses_api_models"]["vllm_model"]
    assert proxy["return_token_id_information"] is True
    assert proxy["base_url"] == "${policy_base_url}"
    assert found["policy_base_url"] == f"http://127.0.0.1:{GymSection().policy_port}/v1"
