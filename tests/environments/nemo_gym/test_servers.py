"""Discovery against what head servers of several versions were recorded to list."""

import asyncio

import pytest

from made_gym_server import FakeGym, exchange
from upweight.environments.nemo_gym.servers import GymClient, discover
from upweight.errors import UserError


def discovered(listed: str, config: str):
    """What is found where the head server answers as recorded."""
    fake = FakeGym()
    answers = {"server_instances": exchange(listed), "global_config_dict_yaml": exchange(config)}
    fake._found = lambda instance, *_: (200, answers[instance]["response"]["json"], {})

    async def run():
        link = GymClient()
        try:
            return await discover(link, f"http://127.0.0.1:{fake.port}")
        finally:
            await link.close()

    try:
        return asyncio.run(run())
    finally:
        fake.close()


@pytest.mark.parametrize(
    "listed", ["head_02_server_instances", "wheel_040_head_server_instances", "wheel_070_head_server_instances"]
)
def test_servers_are_found_by_instance_and_implementation(listed):
    servers = discovered(listed, "head_01_global_config_dict_yaml")
    assert servers.resource("reasoning_gym").url.startswith("http://127.0.0.1:")
    assert servers.resource("reasoning_gym_simple_agent") == servers.resource("reasoning_gym")
    assert servers.agent("reasoning_gym").instance == "reasoning_gym_simple_agent"


def test_an_instance_may_be_called_otherwise_than_its_implementation():
    servers = discovered("head_02_server_instances", "head_01_global_config_dict_yaml")
    found = servers.resource("example_multi_step")
    assert found.instance == "example_multi_step_resources_server"
    assert found == servers.resource("example_multi_step_resources_server")
    assert servers.agent("example_multi_step").instance == "example_multi_step_simple_agent"


def test_what_proxies_ask_is_known_and_their_keys_are_not():
    servers = discovered("head_02_server_instances", "head_01_global_config_dict_yaml")
    proxy = servers.proxy_of["reasoning_gym_simple_agent"]
    assert proxy.url.startswith("http://127.0.0.1:18000")
    assert proxy.model == "mock-model"
    config = exchange("head_01_global_config_dict_yaml")["response"]["json"]
    key = next(line.partition(":")[2].strip() for line in config.splitlines() if line.startswith("policy_api_key"))
    assert key
    assert key not in repr(servers)


def test_an_unknown_name_is_answered_with_those_there_are():
    servers = discovered("head_02_server_instances", "head_01_global_config_dict_yaml")
    with pytest.raises(UserError, match=r"no server 'reasoning_gim'.*Did you mean 'reasoning_gym'"):
        servers.resource("reasoning_gim")
