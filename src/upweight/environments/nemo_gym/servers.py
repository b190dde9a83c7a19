"""The servers of a running Gym: requests with time limits and typed faults, discovery, and search by name."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from operator import itemgetter
from typing import Any, Literal

import httpx
import yaml

from upweight.errors import UserError, did_you_mean

RESOURCES, AGENTS, MODELS = "resources_servers", "responses_api_agents", "responses_api_models"
ANSWER_SECONDS = 30.0  # seconds that a request to the head server may take
MAX_CONCURRENT = 64  # requests at a time
DOWN = 521  # status of the relay to isolated servers where no server listens at the port
BUSY = (429, 502, 503, 504)

# unreached: it never arrived. lost: it broke off. late: no answer in time. restarted: the server has lost the session.
FaultKind = Literal["unreached", "lost", "late", "refused", "restarted"]


class GymFault(Exception):
    """A server of the Gym broke, or gave an answer that nothing can be learned from."""

    def __init__(self, message: str, kind: FaultKind = "refused") -> None:
        super().__init__(message)
        self.kind: FaultKind = kind


class GymClient:
    """Connections to servers. Cookies belong to rollouts and are never shared."""

    def __init__(self, uds: str | None = None) -> None:
        """`uds`: Unix socket through which servers without a network are reached."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CONCURRENT)
        transport = httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx.AsyncClient(transport=transport, cookies=no_cookies, timeout=None)
        self._room = asyncio.Semaphore(MAX_CONCURRENT)

    async def ask(
        self, url: str, body: Any = None, *, limit: float, cookies: httpx.Cookies | None = None, queues: bool = True
    ) -> httpx.Response:
        """One request, with POST where there is a body; the limit begins when it is sent."""
        route = url.partition("://")[2].partition("/")[2] or "its address"
        request = self._http.build_request("GET" if body is None else "POST", url, json=body)
        if cookies is not None:
            cookies.set_cookie_header(request)
        async with self._room if queues else contextlib.nullcontext():
            try:
                async with asyncio.timeout(limit):
                    answer = await self._http.send(request)
            except TimeoutError:
                raise GymFault(f"/{route}: no answer within {limit:g} seconds", "late") from None
            except httpx.ConnectError as error:
                raise GymFault(f"/{route}: {error}", "unreached") from None
            except httpx.HTTPError as error:
                raise GymFault(f"/{route}: {type(error).__name__}: {error}", "lost") from None
        if answer.status_code == DOWN:
            raise GymFault(f"/{route}: nothing listens there", "unreached")
        if cookies is not None:
            cookies.extract_cookies(answer)
        return answer

    async def close(self) -> None:
        await self._http.aclose()


def excerpt(answer: httpx.Response) -> str:
    """Status and beginning of an answer, for messages."""
    return f"{answer.status_code} {' '.join(answer.text.split())[:200]}".rstrip()


@dataclass(frozen=True)
class GymServer:
    """One server; after a restart it is a different one."""

    instance: str
    implementation: str
    kind: str
    url: str
    life: tuple[Any, Any] = (None, None)  # process and start


@dataclass(frozen=True)
class Proxy:
    """Where a model server of the Gym sends requests: address and model. Its API key is not kept."""

    url: str
    model: str
    url_key: str  # key of the Gym's config that sets the address


@dataclass(frozen=True)
class GymServers:
    """The servers of a Gym, and which agent works with which of them."""

    all: Sequence[GymServer]
    resource_of: Mapping[str, str]  # by agent
    proxy_of: Mapping[str, Proxy]  # by agent

    def urls(self) -> dict[str, str]:
        """Address -> instance of the servers that rollouts use."""
        return {server.url: server.instance for server in self.all if server.kind in (RESOURCES, AGENTS)}

    def resource(self, name: str) -> GymServer:
        """The resource server of that instance or implementation, or the one that the agent of that name works with."""
        return self._find_server(RESOURCES, self.resource_of.get(name, name))

    def agent(self, name: str) -> GymServer:
        """The agent of that instance, or the one that works with the resource server of that name."""
        if any(server.kind == AGENTS and server.instance == name for server in self.all):
            return self._find_server(AGENTS, name)
        resource = self._find_server(RESOURCES, name).instance
        agents = [agent for agent, served in self.resource_of.items() if served == resource]
        if not agents:
            remedy = "Start one (`upweight init gym` writes its config), or drop the key: tools need no agent."
            raise UserError(f"nemo_gym_multi_turn: no agent of the Gym works with '{resource}'. {remedy}")
        return self._find_server(AGENTS, agents[0])

    def _find_server(self, kind: str, name: str) -> GymServer:
        candidates = [server for server in self.all if server.kind == kind]
        for attribute in ("instance", "implementation"):
            servers = [server for server in candidates if getattr(server, attribute) == name]
            if len(servers) == 1:
                return servers[0]
            if servers:
                names = ", ".join(server.instance for server in servers)
                raise UserError(f"nemo_gym_datasets: the Gym has several servers '{name}': choose among {names}.")
        names = [server.instance for server in candidates]
        has = f"{did_you_mean(name, names)} It has {', '.join(names) or 'none'}."
        raise UserError(f"nemo_gym_datasets: the Gym has no server '{name}'.{has}")


async def discover(client: GymClient, head: str) -> GymServers:
    """The servers that the head server at an address lists; GymFault where there is none yet."""
    answer = await client.ask(f"{head}/server_instances", limit=ANSWER_SECONDS)
    try:
        entries = [entry for entry in answer.json() if entry.get("url")] if answer.is_success else []
        names = itemgetter("config_path", "name", "server_type", "url")
        servers = [GymServer(*names(entry), life=(entry.get("pid"), entry.get("start_time"))) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError):
        servers = []
    if not servers:
        raise GymFault(f"{head}/server_instances lists no servers ({answer.status_code})")
    agents = [server for server in servers if server.kind == AGENTS]
    if not agents:
        return GymServers(servers, {}, {})
    config = await client.ask(f"{head}/global_config_dict_yaml", limit=ANSWER_SECONDS)
    # It holds keys in clear text: only names and addresses are taken from it, and nothing of it is ever shown.
    try:
        parsed = yaml.safe_load(config.json())
    except (ValueError, yaml.YAMLError):
        raise GymFault("the head server's config cannot be read", "lost") from None
    return GymServers(servers, *_agents(parsed, agents))


def _agents(config: Mapping[str, Any], agents: Iterable[GymServer]) -> tuple[dict[str, str], dict[str, Proxy]]:
    """The resource server and the proxy of each agent, as the Gym's config has them."""
    resource_of, proxy_of = {}, {}
    for agent in agents:
        settings = _value_at(config, agent.instance, AGENTS, agent.implementation)
        resource = _value_at(settings, "resources_server", "name")
        if isinstance(resource, str):
            resource_of[agent.instance] = resource
        instance = str(_value_at(settings, "model_server", "name"))
        models = _value_at(config, instance, MODELS)
        for implementation, model in models.items() if isinstance(models, Mapping) else ():
            key = _reference(_value_at(model, "base_url")) or f"{instance}.{MODELS}.{implementation}.base_url"
            url, name = _value_at(config, *key.split(".")), _value_at(model, "model")
            name = _value_at(config, *reference.split(".")) if (reference := _reference(name)) else name
            proxy_of[agent.instance] = Proxy(str(url[0] if isinstance(url, list) and url else url), str(name), key)
    return resource_of, proxy_of


def _value_at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _reference(value: Any) -> str | None:
    """The key that a value refers to as `${key}`."""
    return value[2:-1] if isinstance(value, str) and value.startswith("${") and value.endswith("}") else None
