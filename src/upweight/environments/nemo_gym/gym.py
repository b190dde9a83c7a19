"""A Gym's servers: discovery, requests with retries, health checks, and restarts of servers that the run started."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import httpx

from upweight.environments.nemo_gym.client import BUSY, GymClient, GymFault, excerpt
from upweight.environments.nemo_gym.process import GymProcess
from upweight.environments.nemo_gym.servers import GymServer, GymServers, discover
from upweight.errors import UserError
from upweight.log import logger

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts
WATCH = 5.0  # seconds between health checks of servers that the run started
LIVENESS = 10.0  # seconds that a health check may take, at least
SEED = "/seed_session"
MOST_RESTARTS = 5  # in a row, without an answer in between


class Gym:
    """The servers behind one head server. Used on one event loop, from `start` on."""

    def __init__(
        self,
        port: int,
        *,
        patience: float,
        busy: float = 0.0,
        process: GymProcess | None = None,
        socket: str | None = None,
    ) -> None:
        """`patience`: seconds that servers may take to start. `busy`: seconds that one request may keep them.

        `process`: the servers, where the run starts them. `socket`: file that leads to servers without a network.
        """
        self._socket, self._liveness = socket, max(busy, LIVENESS)
        self.head, self.patience, self.process = f"http://127.0.0.1:{port}", patience, process
        self.servers = GymServers((), {}, {})
        self._in_a_row = 0
        self._watch: asyncio.Task[None] | None = None
        self._healthy, self._suspected = asyncio.Event(), asyncio.Event()
        self._broken: UserError | None = None

    async def start(self) -> None:
        """Start the servers where the run starts them, and wait until they answer."""
        self._healthy, self._suspected, self._broken = asyncio.Event(), asyncio.Event(), None
        if self.process is not None:
            self.process.spawn()
        await self._connect()
        self._healthy.set()
        if self.process is not None:
            self._watch = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Close the connections, and end the servers where the run started them."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if hasattr(self, "link"):
            await self.client.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)
            self.process.remove()

    async def resource(self, name: str) -> GymServer:
        """The resource server of a name, once it is healthy."""
        await self._until_healthy()
        return self.servers.resource(name)

    async def agent(self, name: str) -> GymServer:
        """The agent of a name, once it is healthy."""
        await self._until_healthy()
        return self.servers.agent(name)

    async def post(
        self,
        server: GymServer,
        path: str,
        body: Mapping[str, Any],
        *,
        limit: float,
        cookies: httpx.Cookies | None = None,
        repeat: bool = True,
    ) -> httpx.Response:
        """The answer to a request, retried after faults; GymFault where none comes or the server was restarted.

        Without `repeat`, requests that may have had an effect are not retried, and errors of the server are answers.
        """
        problem = GymFault("")
        for pause in (0.0, *PAUSES):
            await asyncio.sleep(pause)
            await self._until_healthy()
            if server not in self.servers.all:
                raise GymFault(f"{server.instance} was started anew in between", "restarted")
            try:
                answer = await self.client.ask(server.url + path, body, limit=limit, cookies=cookies)
            except GymFault as fault:
                problem = GymFault(f"{server.instance}: {fault}", fault.kind)
                await self._check_after_fault()
                hangs = fault.kind == "late" and path != SEED  # what hung a server would hang it again
                if hangs or (fault.kind == "lost" and not repeat):
                    raise problem from None
                continue
            self._in_a_row = 0
            if answer.status_code not in BUSY and not (repeat and answer.status_code >= 500):
                return answer
            problem = GymFault(f"{server.instance}: {path}: {excerpt(answer)}")
        raise problem

    async def _until_healthy(self) -> None:
        """Wait while servers are restarted."""
        await self._healthy.wait()
        if self._broken is not None:
            raise self._broken

    async def _check_after_fault(self) -> None:
        """After a fault, check the servers that the run started, or discover again those that it did not."""
        if self.process is not None:
            self._suspected.set()
            await asyncio.sleep(0.1)
            return
        with contextlib.suppress(GymFault):
            self.servers = await discover(self.client, self.head)

    async def _connect(self) -> None:
        """Wait until the head server lists servers and all of them answer."""
        clock = asyncio.get_running_loop().time
        began, announced = clock(), False
        while True:
            if self.process is not None and self.process.ended():
                raise UserError(f"the Gym's servers ended: {self.process.last_log_line()}. See {self.process.log}.")
            self.client = GymClient(self._socket)
            try:
                servers = await discover(self.client, self.head)
                await asyncio.gather(*(self.client.ask(f"{url}/", limit=self._liveness) for url in servers.urls()))
                self.servers = servers
                return
            except GymFault as fault:
                await self.client.close()
                if clock() - began > self.patience:
                    raise UserError(self._timed_out(fault)) from None
            if not announced:
                announced = True
                logger.info("waiting for the servers of NeMo Gym at %s, up to %.0f seconds", self.head, self.patience)
            await asyncio.sleep(1.0)

    def _timed_out(self, fault: GymFault) -> str:
        text = f"NeMo Gym at {self.head} does not answer within {self.patience:.0f} seconds: {fault}."
        if self.process is not None:
            return f"{text} See {self.process.log}, or raise 'nemo_gym_server_timeout'."
        return f"{text} Start it with ng_run, correct 'nemo_gym_head_port', or set 'nemo_gym_auto_start: true'."

    async def _supervise(self) -> None:
        """Restart the servers when one has died or hangs."""
        assert self.process is not None
        while True:
            # Not `wait_for`: where the event is set already, it loses the cancellation that ends this.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH):
                    await self._suspected.wait()
            self._suspected.clear()
            problem = "they ended" if self.process.ended() else await self._unhealthy_server()
            if problem is None:
                continue
            self._in_a_row += 1
            logger.warning("warning: starting the servers of NeMo Gym anew: %s", problem)
            self._healthy.clear()
            old = self.client
            await asyncio.to_thread(self.process.end)
            try:
                if self._in_a_row > MOST_RESTARTS:
                    raise UserError(f"the Gym's servers were started {MOST_RESTARTS} times in vain; see their log.")
                self.process.spawn()
                await self._connect()
            except UserError as error:
                self._broken = error
                return
            finally:
                self._healthy.set()
                await old.close()

    async def _unhealthy_server(self) -> str | None:
        """The problem of a server that does not answer its health check, or None."""

        async def problem_of(instance: str, url: str) -> str | None:
            try:
                await self.client.ask(f"{url}/", limit=self._liveness, queues=False)
            except GymFault as fault:
                return f"{instance}: {fault}"
            return None

        problems = await asyncio.gather(*(problem_of(instance, url) for url, instance in self.servers.urls().items()))
        return next(filter(None, problems), None)
