"""Completions by the agents of a Gym, which drive the turns themselves and ask the policy through its proxy."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from upweight.data.formats.nemo_gym import PARAMS, row_of
from upweight.environments.nemo_gym.agent_turns import is_finished, messages_of, turns_of
from upweight.environments.nemo_gym.client import GymFault
from upweight.environments.nemo_gym.environment import NemoGym
from upweight.environments.nemo_gym.responses import verdict
from upweight.environments.nemo_gym.servers import Proxy, Server
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rollout.episodes.gateway import PolicyGateway
from upweight.rollout.episodes.loop import EpisodeResult
from upweight.rollout.episodes.runner import EnvironmentLoop, fill_group, gather_or_cancel
from upweight.rollout.episodes.token_stream import TokenStream
from upweight.types import Completion, Group, Sampling

AT_A_TIME = 256  # rollouts under way


@dataclass
class GymAgents:
    """Fills groups by asking an agent of the Gym for each rollout."""

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
            found = work.result()
        finally:
            work.cancel()
        for place, (group, played) in enumerate(zip(groups, found, strict=True)):
            fill_group(group, played)
            if done is not None:
                done(place)

    def close(self) -> None:
        """Stop the servers and the way to the policy; a later call starts them anew."""
        self._loop.close()
        if self.gateway is not None:
            self.gateway.close()

    async def _all(self, groups: Sequence[Group], count: int, sampling: Sampling) -> list[list[EpisodeResult]]:
        room = asyncio.Semaphore(AT_A_TIME)

        async def one(group: Group) -> EpisodeResult:
            async with room:
                return await self._play(group.row, sampling)

        found = await gather_or_cancel(one(group) for group in groups for _ in range(count))
        return [found[start : start + count] for start in range(0, len(found), count)]

    async def _play(self, row: Mapping[str, Any], sampling: Sampling) -> EpisodeResult:
        """One rollout; a fault of the Gym is noted in it."""
        gateway = self.gateway
        assert gateway is not None
        section, played = self.environment.section, EpisodeResult()
        name = self.environment.server_name(row)
        began, version = time.monotonic(), gateway.server.version()
        try:
            agent = await self.environment.gym.agent(name)
            self._check_policy(agent)
            body = _request(row_of(row), sampling)
            answer = await self.environment.gym.post(agent, "/run", body, limit=section.run_timeout, repeat=False)
            found = verdict(answer)
            played.stream, played.turns = _stream(found, lambda logps: gateway.version_of(logps, version))
            played.messages, played.finished = messages_of(found), is_finished(found)
            played.calls = sum("tool_calls" in message for message in played.messages)
            if section.max_turns is not None and played.turns > section.max_turns:
                raise GymFault(f"{played.turns} turns where nemo_gym_max_turns allows {section.max_turns}")
            played.outcome = self.environment.outcome_of(found, name)
        except GymFault as fault:
            warn_once(f"NeMo Gym: {name}: {fault}; such samples are left out (environment/masked counts them)")
            played.failure = f"{name}: {fault}"
        played.seconds = time.monotonic() - began
        return played

    def _check_policy(self, agent: Server) -> None:
        """Refuse an agent whose proxy would ask another model than the policy."""
        if agent.instance in self._checked or self.gateway is None:
            return
        proxy = self.environment.gym.servers.proxy_of.get(agent.instance)
        problem = None if proxy is None else _stranger(proxy, self.gateway)
        if problem is not None:
            raise UserError(
                f"nemo_gym_multi_turn: the agent '{agent.instance}' asks {problem}. Start the Gym with "
                f"+policy_base_url={self.gateway.url}, which always leads to the policy."
            )
        self._checked.add(agent.instance)


def _stranger(proxy: Proxy, gateway: PolicyGateway) -> str | None:
    """What a proxy asks that is not the policy, or None."""
    place, own = _place(proxy.url), gateway.server
    if place == _place(gateway.url):
        return None
    if place != _place(own.client.url):
        return f"{proxy.url}, where the policy is not"
    name = own.serves_by_name()
    if name is None:
        return f"vLLM for '{proxy.model}', but adapters have a new name there after each sync"
    return None if proxy.model == name else f"vLLM for '{proxy.model}', but the policy is '{name}' there"


def _place(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return "127.0.0.1" if parts.hostname in ("localhost", "0.0.0.0") else parts.hostname, parts.port


def _request(row: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """The row with the sampling that the policy is to be asked for."""
    asked = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_output_tokens": sampling.max_new_tokens}
    tools = [{"strict": False, **tool} for tool in row[PARAMS].get("tools") or ()]  # the Gym insists on the field
    return {**row, PARAMS: {**row[PARAMS], **asked, **({"tools": tools} if tools else {})}}


def _stream(found: Mapping[str, Any], version_of: Callable[[Sequence[float]], int]) -> tuple[TokenStream, int]:
    """The tokens of a rollout: a turn whose prompt does not go on from the one before begins a sequence of its own."""
    first, *others = turns_of(found)
    stream = TokenStream(first.prompt)
    for turn in (first, *others):
        if turn is not first:
            known = len(stream.ids)
            if turn.prompt[:known] == stream.ids:
                stream.append_observation(turn.prompt[known:])
            else:
                stream.restart(turn.prompt)
        stream.append_sampled(Completion(turn.ids, turn.logps, [version_of(turn.logps)] * len(turn.ids), finished=True))
    return stream, 1 + len(others)
