"""Episodes that a Gym's servers verify; they are asked with retries, and restarted where the run started them."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from upweight.config.sections.rollout import GymSection
from upweight.data.formats.nemo_gym import PARAMS, SERVER, row_of, tools_of
from upweight.environments.episode import Environment, Episode, EpisodeOutcome, Message, Opening, Reply, ToolCall, Turn
from upweight.environments.nemo_gym.process import GymProcess
from upweight.environments.nemo_gym.responses import Item, items_of, response_of, verification_of
from upweight.environments.nemo_gym.servers import BUSY, GymClient, GymFault, GymServer, GymServers, discover, excerpt
from upweight.environments.tools import opening_messages, tool_message
from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.log import logger

REWARD = "nemo_gym"
NO_TOOL = '{"detail":"Not Found"}'  # as the servers say it
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts
CHECK_SECONDS = 5.0  # seconds between health checks of servers that the run started
MIN_CHECK_TIMEOUT = 10.0  # seconds that a health check may take, at least
SEED = "/seed_session"
MOST_RESTARTS = 5  # in a row, without an answer in between


class NemoGym(Environment):
    """The servers behind a head server, with one session of theirs for each episode; used on one event loop."""

    def __init__(
        self, section: GymSection, model: str = "policy", process: GymProcess | None = None, uds: str | None = None
    ) -> None:
        """`process`: the servers, where the run starts them. `uds`: Unix socket to servers without a network."""
        self.section, self.model, self.process, self._uds = section, model, process, uds
        self.head = f"http://127.0.0.1:{section.head_port}"
        self._liveness = max(section.verify_timeout, MIN_CHECK_TIMEOUT)
        self.servers = GymServers((), {}, {})
        self._in_a_row = 0
        self._watch: asyncio.Task[None] | None = None
        self._healthy, self._suspected = asyncio.Event(), asyncio.Event()
        self._broken: UserError | None = None

    @property
    def reward_names(self) -> Sequence[str]:
        return tuple(self.section.reward_components) or (REWARD,)

    def episode(self) -> "GymEpisode":
        return GymEpisode(self)

    async def start(self) -> None:
        """Start the servers where the run starts them, wait until they answer, and find those that the data names."""
        self._healthy, self._suspected, self._broken = asyncio.Event(), asyncio.Event(), None
        if self.process is not None:
            self.process.spawn()
        limit = f"nemo_gym_server_timeout: {self.section.server_timeout:g} s"
        with activity(f"waiting for the servers of NeMo Gym at {self.head} ({limit})"):
            await self._wait_for_servers()
        self._healthy.set()
        if self.process is not None:
            self._watch = asyncio.create_task(self._restart_dead_servers())
        for dataset in self.section.datasets:
            if dataset.server_name is not None:
                self.servers.resource(dataset.server_name)

    def server_name(self, row: Mapping[str, Any]) -> str:
        """The server that verifies a row: named with the data, by the row itself, or the only one that is named."""
        reference = row.get("agent_ref")
        agent = reference.get("name") if isinstance(reference, Mapping) else None
        named = {dataset.server_name for dataset in self.section.datasets if dataset.server_name}
        name = row.get(SERVER) or agent or (next(iter(named)) if len(named) == 1 else None)
        if not isinstance(name, str):
            remedy = "Give its dataset a 'server_name', or the row an 'agent_ref'."
            raise UserError(f"nemo_gym_datasets: a row names no server. {remedy}")
        return name

    def outcome_of(self, verification: Mapping[str, Any], server: str) -> EpisodeOutcome:
        """Return a verification's reward, or the components that the config names; other values are details."""
        rewards: Mapping[str, Any] = {REWARD: verification["reward"]}
        if names := self.section.reward_components:
            values = verification.get("reward_components")
            values = values if isinstance(values, Mapping) else {}
            if lacking := [name for name in names if not isinstance(values.get(name), int | float)]:
                has = ", ".join(map(str, values)) or "none"
                raise GymFault(f"/verify: no reward component {', '.join(lacking)}; there is {has}")
            rewards = {name: values[name] for name in names}
        plain = {key: value for key, value in verification.items() if isinstance(value, bool | int | float | str)}
        details = {SERVER: server} | {key: value for key, value in plain.items() if key != "reward"}
        return EpisodeOutcome({name: float(value) for name, value in rewards.items()}, details=details)

    async def stop(self) -> None:
        """Close the connections, and end the servers where the run started them."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if hasattr(self, "client"):
            await self.client.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)
            self.process.remove()

    async def post(
        self,
        server: GymServer,
        path: str,
        body: Mapping[str, Any],
        *,
        limit: float,
        cookies: httpx.Cookies | None = None,
        repeat: bool = True,  # else errors of the server are answers: the request may have had an effect
    ) -> httpx.Response:
        """The answer to a request, retried after faults; GymFault where none comes or the server was restarted."""
        problem = GymFault("")
        for pause in (0.0, *RETRY_SECONDS):
            await asyncio.sleep(pause)
            await self.until_healthy()
            if server not in self.servers.all:
                raise GymFault(f"{server.instance} was restarted in between", "restarted")
            try:
                answer = await self.client.ask(server.url + path, body, limit=limit, cookies=cookies)
            except GymFault as fault:
                problem = GymFault(f"{server.instance}: {fault}", fault.kind)
                if self.process is not None:  # the servers that the run started are checked
                    self._suspected.set()
                    await asyncio.sleep(0.1)
                else:  # others are discovered again
                    with contextlib.suppress(GymFault):
                        self.servers = await discover(self.client, self.head)
                hangs = fault.kind == "late" and path != SEED  # what hung a server would hang it again
                if hangs or (fault.kind == "lost" and not repeat):
                    raise problem from None
                continue
            self._in_a_row = 0
            if answer.status_code not in BUSY and not (repeat and answer.status_code >= 500):
                return answer
            problem = GymFault(f"{server.instance}: {path}: {excerpt(answer)}")
        raise problem

    async def until_healthy(self) -> None:
        """Wait while servers are restarted."""
        await self._healthy.wait()
        if self._broken is not None:
            raise self._broken

    async def _wait_for_servers(self) -> None:
        """Wait until the head server lists servers and all of them answer."""
        clock, patience = asyncio.get_running_loop().time, self.section.server_timeout
        began, announced = clock(), False
        while True:
            if self.process is not None and self.process.ended():
                raise UserError(f"the Gym's servers ended: {self.process.last_log_line()}. See {self.process.log}.")
            self.client = GymClient(self._uds)
            try:
                servers = await discover(self.client, self.head)
                await asyncio.gather(*(self.client.ask(f"{url}/", limit=self._liveness) for url in servers.urls()))
                self.servers = servers
                return
            except GymFault as fault:
                await self.client.close()
                if clock() - began > patience:
                    hint = "Start it with ng_run, correct 'nemo_gym_head_port', or set 'nemo_gym_auto_start: true'."
                    if self.process is not None:
                        hint = f"See {self.process.log}, or raise 'nemo_gym_server_timeout'."
                    late = f"does not answer within {patience:.0f} seconds: {fault}."
                    raise UserError(f"NeMo Gym at {self.head} {late} {hint}") from None
            if not announced:
                announced = True
                logger.info("waiting for the servers of NeMo Gym at %s, up to %.0f seconds", self.head, patience)
            await asyncio.sleep(1.0)

    async def _restart_dead_servers(self) -> None:
        """Restart the servers when one has died or hangs."""
        assert self.process is not None
        while True:
            # Not `wait_for`: where the event is set already, it loses the cancellation that ends this.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._suspected.wait()
            self._suspected.clear()
            problem = "they ended"
            if not self.process.ended():
                urls = self.servers.urls()
                checks = (self.client.ask(f"{url}/", limit=self._liveness, queues=False) for url in urls)
                answers = zip(urls.values(), await asyncio.gather(*checks, return_exceptions=True), strict=True)
                faults = [f"{instance}: {answer}" for instance, answer in answers if isinstance(answer, GymFault)]
                if not faults:
                    continue
                problem = faults[0]
            self._in_a_row += 1
            logger.warning("warning: restarting the servers of NeMo Gym: %s", problem)
            self._healthy.clear()
            old = self.client
            await asyncio.to_thread(self.process.end)
            try:
                if self._in_a_row > MOST_RESTARTS:
                    raise UserError(f"the Gym's servers failed after {MOST_RESTARTS} restarts; see their log.")
                self.process.spawn()
                await self._wait_for_servers()
            except UserError as error:
                self._broken = error
                return
            finally:
                self._healthy.set()
                await old.close()


@dataclass
class GymEpisode(Episode):
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
        return Opening(opening_messages(row["prompt"]), tools_of(row))

    async def reply(self, turn: Turn) -> Reply:
        """Execute the calls of a turn in order; a turn without calls ends the episode."""
        self.turns += 1
        calls = [(call.id or f"call_{self.calls + number}", call) for number, call in enumerate(turn.calls)]
        self.items += items_of(turn, calls, self.turns)
        messages: list[Message] = []
        failed = 0
        for identity, call in calls:
            output, went_well = await self._call_tool(call)
            failed += not went_well
            self.items.append({"type": "function_call_output", "call_id": identity, "output": output})
            messages.append(tool_message(call, output))
        most = self.environment.section.max_turns
        return Reply(() if most is not None and self.turns >= most else messages, failed)

    async def outcome(self) -> EpisodeOutcome:
        try:
            answer = await self._verify()
        except GymFault as fault:
            if fault.kind != "restarted" or self.calls:
                raise
            # No tool was called in the lost session: a new one is equivalent.
            await self._open_session()
            answer = await self._verify()
        return self.environment.outcome_of(verification_of(answer), self.name)

    async def _open_session(self) -> None:
        """Open a session; retried once where the server was restarted meanwhile."""
        for last in (False, True):
            self.cookies = httpx.Cookies()
            await self.environment.until_healthy()
            self.server = self.environment.servers.resource(self.name)
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
        response = response_of(self.items, self.row[PARAMS], self.environment.model)
        return await self._post("/verify", {**self.row, "response": response})

    async def _call_tool(self, call: ToolCall) -> tuple[str, bool]:
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
        return await self.environment.post(self.server, path, body, limit=limit, cookies=self.cookies, repeat=repeat)
