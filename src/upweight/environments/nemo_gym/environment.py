"""Episodes that the Gym's servers verify: one answer to a prompt, or turns with the tools that a server offers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from upweight.config.sections.rollout import GymSection
from upweight.data.formats.nemo_gym import PARAMS, SERVER, row_of, tools_of
from upweight.environments.episode import EpisodeOutcome, Message, Opening, Reply, ToolCall, Turn
from upweight.environments.nemo_gym.client import GymFault
from upweight.environments.nemo_gym.gym import SEED, Gym
from upweight.environments.nemo_gym.responses import (
    Item,
    details_of,
    items_of,
    output_item,
    response_of,
    rewards_of,
    verification_of,
)
from upweight.environments.nemo_gym.servers import GymServer
from upweight.environments.tools import tool_message
from upweight.errors import UserError

REWARD = "nemo_gym"
NO_TOOL = '{"detail":"Not Found"}'  # as the servers say it


@dataclass
class NemoGym:
    """The servers of a config, one session of theirs for each episode."""

    section: GymSection
    gym: Gym
    model_name: str = "policy"

    @property
    def reward_names(self) -> Sequence[str]:
        """The reward of the verification, or the components of it that the config names."""
        return tuple(self.section.reward_components) or (REWARD,)

    def episode(self) -> "GymEpisode":
        """A new episode without a session yet."""
        return GymEpisode(self)

    async def start(self) -> None:
        """Wait for the servers, and check that those which the data names are among them."""
        await self.gym.start()
        for dataset in self.section.datasets:
            if dataset.server_name is not None:
                self.gym.servers.resource(dataset.server_name)

    async def stop(self) -> None:
        """End the servers where the run started them."""
        await self.gym.stop()

    def server_name(self, row: Mapping[str, Any]) -> str:
        """The server that verifies a row: named with the data, by the row itself, or the only one that is named."""
        reference = row.get("agent_ref")
        agent = reference.get("name") if isinstance(reference, Mapping) else None
        named = {dataset.server_name for dataset in self.section.datasets if dataset.server_name}
        name = row.get(SERVER) or agent or (next(iter(named)) if len(named) == 1 else None)
        if not isinstance(name, str):
            raise UserError(
                "nemo_gym_datasets: a row names no server. Give its dataset a 'server_name', or the row an 'agent_ref'."
            )
        return name

    def outcome_of(self, verification: Mapping[str, Any], server: str) -> EpisodeOutcome:
        """Rewards and details of an episode from a server's verification."""
        rewards = rewards_of(verification, self.section.reward_components, REWARD)
        return EpisodeOutcome(rewards, details={SERVER: server, **details_of(verification)})


@dataclass
class GymEpisode:
    """One rollout: its session with a server, and the items that the policy wrote."""

    environment: NemoGym
    cookies: httpx.Cookies = field(default_factory=httpx.Cookies)
    items: list[Item] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)
    name: str = ""  # of the server, as the row has it
    turns: int = 0
    calls: int = 0
    server: GymServer | None = None

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Open a session with the whole row."""
        self.row, self.name = row_of(row), self.environment.server_name(row)
        await self._open_session()
        prompt = row["prompt"]
        return Opening([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, tools_of(row))

    async def reply(self, turn: Turn) -> Reply:
        """Execute the calls of a turn in order; a turn without calls ends the episode."""
        self.turns += 1
        calls = [(call.id or f"call_{self.calls + number}", call) for number, call in enumerate(turn.calls)]
        self.items += items_of(turn, calls, self.turns)
        messages: list[Message] = []
        failed = 0
        for identity, call in calls:
            output, went_well = await self._call(call)
            failed += not went_well
            self.items.append(output_item(identity, output))
            messages.append(tool_message(call, output))
        most = self.environment.section.max_turns
        return Reply(() if most is not None and self.turns >= most else messages, failed)

    async def outcome(self) -> EpisodeOutcome:
        """The verification of the whole episode."""
        try:
            answer = await self._verify()
        except GymFault as fault:
            if fault.kind != "restarted" or self.calls:
                raise
            # No tool was called in the lost session: a new one is equivalent.
            await self._open_session()
            answer = await self._verify()
        return self.environment.outcome_of(verification_of(answer), self.name)

    async def close(self) -> None:
        """Sessions end by themselves."""

    async def _open_session(self) -> None:
        """Open a session; retried once where the server was restarted meanwhile."""
        for last in (False, True):
            self.cookies = httpx.Cookies()
            self.server = await self.environment.gym.resource(self.name)
            try:
                answer = await self._post(SEED, self.row)
            except GymFault as fault:
                if fault.kind != "restarted" or last:
                    raise
                continue
            if answer.status_code != httpx.codes.OK:
                raise GymFault(f"{self.name}: {SEED}: {answer.status_code}")
            return

    async def _verify(self) -> httpx.Response:
        response = response_of(self.items, self.row[PARAMS], self.environment.model_name)
        return await self._post("/verify", {**self.row, "response": response})

    async def _call(self, call: ToolCall) -> tuple[str, bool]:
        """A tool's output and whether it succeeded; the policy reads errors as output, as with the Gym's agents."""
        self.calls += 1
        if call.error:
            return f"error: {call.error}", False
        if not call.name.isidentifier():
            return NO_TOOL, False
        answer = await self._post(f"/{call.name}", dict(call.arguments), repeat=False)
        return answer.text, answer.is_success

    async def _post(self, path: str, body: Mapping[str, Any], *, repeat: bool = True) -> httpx.Response:
        assert self.server is not None, "the episode is not open"
        limit = self.environment.section.verify_timeout
        return await self.environment.gym.post(
            self.server, path, body, limit=limit, cookies=self.cookies, repeat=repeat
        )
