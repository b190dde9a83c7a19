"""Rollouts by the agents of a Gym, which drive the turns and reach the policy through the Gym's model proxy."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from upweight.config.sections.rollout import GymSection
from upweight.data.formats.nemo_gym import PARAMS, row_of
from upweight.environments.nemo_gym.agent_turns import is_finished, messages_of, turns_of
from upweight.environments.nemo_gym.client import GymFault
from upweight.environments.nemo_gym.environment import NemoGym
from upweight.environments.nemo_gym.responses import verification_of
from upweight.environments.nemo_gym.servers import GymServer, Proxy
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rollout.episodes.gateway import PolicyGateway
from upweight.rollout.episodes.loop import EpisodeResult
from upweight.rollout.episodes.runner import EnvironmentLoop, fill_group, gather_or_cancel
from upweight.rollout.episodes.token_stream import TokenStream
from upweight.types import Completion, Group, Sampling

CONCURRENT = 256  # rollouts at a time


@dataclass
class GymAgents:
    """Fills groups with completions; each is one `/run` of an agent."""

    environment: NemoGym
    gateway: PolicyGateway | None  # None where another process samples
    _checked: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._loop = EnvironmentLoop(self.environment)

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        assert self.gateway is not None, "this process does not sample"
        self.gateway.sampling = sampling
        self.gateway.open()
        work = self._loop.running().start(self._all(groups, count, sampling))
        try:
            episodes = work.result()
        finally:
            work.cancel()
        for place, (group, of_group) in enumerate(zip(groups, episodes, strict=True)):
            fill_group(group, of_group)
            if done is not None:
                done(place)

    def close(self) -> None:
        """Stop the servers and the gateway; a later call starts them again."""
        self._loop.close()
        if self.gateway is not None:
            self.gateway.close()

    async def _all(self, groups: Sequence[Group], count: int, sampling: Sampling) -> list[list[EpisodeResult]]:
        room = asyncio.Semaphore(CONCURRENT)

        async def rollout(group: Group) -> EpisodeResult:
            async with room:
                return await self._play(group.row, sampling)

        episodes = await gather_or_cancel(rollout(group) for group in groups for _ in range(count))
        return [episodes[start : start + count] for start in range(0, len(episodes), count)]

    async def _play(self, row: Mapping[str, Any], sampling: Sampling) -> EpisodeResult:
        """One rollout; a fault of the Gym becomes its `failure`."""
        gateway = self.gateway
        assert gateway is not None
        section, played = self.environment.section, EpisodeResult()
        name = self.environment.server_name(row)
        began, version = time.monotonic(), gateway.server.version()
        try:
            agent = await self.environment.gym.agent(name)
            self._check_policy(agent)
            body = _request(row_of(row), sampling)
            answer = await self.environment.gym.post(agent, "/run", body, limit=_run_limit(section), repeat=False)
            run = verification_of(answer)
            played.stream, played.turns = _stream(run, gateway, version)
            played.messages, played.finished = messages_of(run), is_finished(run)
            played.calls = sum("tool_calls" in message for message in played.messages)
            if section.max_turns is not None and played.turns > section.max_turns:
                raise GymFault(f"{played.turns} turns where nemo_gym_max_turns allows {section.max_turns}")
            played.outcome = self.environment.outcome_of(run, name)
        except GymFault as fault:
            warn_once(f"NeMo Gym: {name}: {fault}; such samples are left out (environment/masked counts them)")
            played.failure = f"{name}: {fault}"
        played.seconds = time.monotonic() - began
        return played

    def _check_policy(self, agent: GymServer) -> None:
        """Refuse an agent whose model proxy sends requests to another model than the policy."""
        if agent.instance in self._checked or self.gateway is None:
            return
        proxy = self.environment.gym.servers.proxy_of.get(agent.instance)
        problem = None if proxy is None else _other_model(proxy, self.gateway)
        if proxy is not None and problem is not None:
            raise UserError(
                f"nemo_gym_multi_turn: the agent '{agent.instance}' asks {problem}. Start the Gym with "
                f"'++{proxy.url_key}={self.gateway.url}' added to its ng_run line: the run passes requests at that "
                "address on to the present weights of the policy."
            )
        self._checked.add(agent.instance)


def _other_model(proxy: Proxy, gateway: PolicyGateway) -> str | None:
    """What a proxy asks that is not the policy, or None."""
    address, server = _address(proxy.url), gateway.server
    if address == _address(gateway.url):
        return None
    if address != _address(server.client.url):
        return f"{proxy.url}, where the policy is not"
    name = server.served_name()
    if name is None:
        return f"vLLM for '{proxy.model}', but adapters have a new name there after each sync"
    return None if proxy.model == name else f"vLLM for '{proxy.model}', but the policy is '{name}' there"


def _address(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return "127.0.0.1" if parts.hostname in ("localhost", "0.0.0.0") else parts.hostname, parts.port


def _request(row: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """The row with the sampling parameters of the policy."""
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": sampling.max_new_tokens,
    }
    tools = [{"strict": False, **tool} for tool in row[PARAMS].get("tools") or ()]  # the Gym insists on the field
    return {**row, PARAMS: {**row[PARAMS], **params, **({"tools": tools} if tools else {})}}


def _run_limit(section: GymSection) -> float:
    """Seconds that `/run` may take: nemo_gym_verify_timeout bounds it too where it is the only limit that is set."""
    only_verify = "verify_timeout" in section.model_fields_set and "run_timeout" not in section.model_fields_set
    return section.verify_timeout if only_verify else section.run_timeout


def _stream(run: Mapping[str, Any], gateway: PolicyGateway, version: int) -> tuple[TokenStream, int]:
    """The tokens of a rollout and its number of turns; `version` is the policy's where the gateway knows no other.

    A turn whose prompt does not continue the tokens of the turn before begins a new sequence.
    """
    turns = turns_of(run)
    stream = TokenStream(turns[0].prompt)
    for number, turn in enumerate(turns):
        if number:
            known = len(stream.ids)
            if turn.prompt[:known] == stream.ids:
                stream.append_observation(turn.prompt[known:])
            else:
                stream.restart(turn.prompt)
        versions = [gateway.version_of(turn.logps, version)] * len(turn.ids)
        logps = turn.logps if gateway.server.weights.reports_sampler_logps else []
        stream.append_sampled(Completion(turn.ids, logps, versions, finished=True))
    return stream, len(turns)
