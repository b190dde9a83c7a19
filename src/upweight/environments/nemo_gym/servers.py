"""Which servers a Gym runs, by the names that configs and rows use for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from upweight.environments.nemo_gym.client import GymClient, GymFault
from upweight.errors import UserError, did_you_mean

RESOURCES, AGENTS, MODELS = "resources_servers", "responses_api_agents", "responses_api_models"
ANSWER = 30.0  # seconds for a question to the head server


@dataclass(frozen=True)
class Server:
    """One server; it is another one after a restart."""

    instance: str
    implementation: str
    kind: str
    url: str
    life: tuple[Any, Any] = (None, None)  # process and start


@dataclass(frozen=True)
class Proxy:
    """What a model server of the Gym asks: an address and a model. Its key is not kept."""

    url: str
    model: str


@dataclass(frozen=True)
class Servers:
    """The servers of a Gym, and which agent works with which of them."""

    all: Sequence[Server]
    resource_of: Mapping[str, str]  # by agent
    proxy_of: Mapping[str, Proxy]  # by agent

    def resource(self, name: str) -> Server:
        """The resource server of that instance or implementation, or the one that the agent of that name works with."""
        return self._find(RESOURCES, self.resource_of.get(name, name))

    def agent(self, name: str) -> Server:
        """The agent of that instance, or the one that works with the resource server of that name."""
        if any(one.kind == AGENTS and one.instance == name for one in self.all):
            return self._find(AGENTS, name)
        resource = self._find(RESOURCES, name).instance
        agents = [agent for agent, served in self.resource_of.items() if served == resource]
        if not agents:
            raise UserError(
                f"nemo_gym_multi_turn: no agent of the Gym works with '{resource}'. Start one (`upweight init gym` "
                "writes its config), or drop the key: turns with tools need no agent."
            )
        return self._find(AGENTS, agents[0])

    def _find(self, kind: str, name: str) -> Server:
        own = [one for one in self.all if one.kind == kind]
        for attribute in ("instance", "implementation"):
            found = [one for one in own if getattr(one, attribute) == name]
            if len(found) == 1:
                return found[0]
            if found:
                names = ", ".join(one.instance for one in found)
                raise UserError(f"nemo_gym_datasets: the Gym has several servers '{name}': choose among {names}.")
        names = [one.instance for one in own]
        shown = ", ".join(names) or "none"
        raise UserError(
            f"nemo_gym_datasets: the Gym has no server '{name}'.{did_you_mean(name, names)} It has {shown}."
        )


async def discover(link: GymClient, head: str) -> Servers:
    """The servers that the head server at an address lists; GymFault where there is none yet."""
    answer = await link.ask(f"{head}/server_instances", limit=ANSWER)
    try:
        listed = answer.json() if answer.is_success else None
        servers = [
            Server(
                one["config_path"], one["name"], one["server_type"], one["url"], (one.get("pid"), one.get("start_time"))
            )
            for one in listed or ()
            if one.get("url")
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        servers = []
    if not servers:
        raise GymFault(f"{head}/server_instances lists no servers ({answer.status_code})")
    if not any(one.kind == AGENTS for one in servers):
        return Servers(servers, {}, {})
    config = await link.ask(f"{head}/global_config_dict_yaml", limit=ANSWER)
    # It holds keys in clear text: only names and addresses are taken from it, and nothing of it is ever shown.
    try:
        parsed = yaml.safe_load(config.json())
    except (ValueError, yaml.YAMLError):
        raise GymFault("the head server's config cannot be read", "lost") from None
    return Servers(servers, *_agents(parsed, [one for one in servers if one.kind == AGENTS]))


def _agents(config: Mapping[str, Any], agents: Iterable[Server]) -> tuple[dict[str, str], dict[str, Proxy]]:
    resource_of, proxy_of = {}, {}
    for agent in agents:
        settings = _at(config, agent.instance, AGENTS, agent.implementation)
        resource = _at(settings, "resources_server", "name")
        if isinstance(resource, str):
            resource_of[agent.instance] = resource
        models = _at(config, str(_at(settings, "model_server", "name")), MODELS)
        for model in models.values() if isinstance(models, Mapping) else ():
            url, name = (_resolved(config, _at(model, key)) for key in ("base_url", "model"))
            proxy_of[agent.instance] = Proxy(str(url[0] if isinstance(url, list) and url else url), str(name))
    return resource_of, proxy_of


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _resolved(config: Mapping[str, Any], value: Any) -> Any:
    """A value that refers to a key of the config as `${key}`."""
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        return _at(config, *value[2:-1].split("."))
    return value
