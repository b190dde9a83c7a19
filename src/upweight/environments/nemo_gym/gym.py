"""A Gym as a run sees it: found, asked with retries, watched, and started anew where it is ours."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import httpx

from upweight.environments.nemo_gym.client import BUSY, GymClient, GymFault, said
from upweight.environments.nemo_gym.process import GymProcess
from upweight.environments.nemo_gym.servers import AGENTS, RESOURCES, Server, Servers, discover
from upweight.errors import UserError
from upweight.log import logger

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts
WATCH = 5.0  # seconds between looks at servers of ours
LIVENESS = 10.0  # seconds in which a server says that it is there, at least
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

        `process`: the servers, where they are ours. `socket`: file through which those without a network are reached.
        """
        self._socket, self._liveness = socket, max(busy, LIVENESS)
        self.head, self.patience, self.process = f"http://127.0.0.1:{port}", patience, process
        self.servers = Servers((), {}, {})
        self._in_a_row = 0
        self._watch: asyncio.Task[None] | None = None
        self._well, self._suspected = asyncio.Event(), asyncio.Event()
        self._broken: UserError | None = None

    async def start(self) -> None:
        """Start the servers where they are ours, and wait until they answer."""
        self._well, self._suspected, self._broken = asyncio.Event(), asyncio.Event(), None
        if self.process is not None:
            self.process.spawn()
        await self._meet()
        self._well.set()
        if self.process is not None:
            self._watch = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End what was started."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        if hasattr(self, "link"):
            await self.link.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)
            self.process.remove()

    async def resource(self, name: str) -> Server:
        """The resource server of a name, as soon as it is well."""
        await self._until_well()
        return self.servers.resource(name)

    async def agent(self, name: str) -> Server:
        """The agent of a name, as soon as it is well."""
        await self._until_well()
        return self.servers.agent(name)

    async def post(
        self,
        server: Server,
        path: str,
        body: Mapping[str, Any],
        *,
        limit: float,
        cookies: httpx.Cookies | None = None,
        repeat: bool = True,
    ) -> httpx.Response:
        """An answer to a request, asked for again after faults; GymFault where none comes, or the server is another.

        Without `repeat`, what may have had an effect is not asked again, and errors of the server are answers.
        """
        problem = GymFault("")
        for pause in (0.0, *PAUSES):
            await asyncio.sleep(pause)
            await self._until_well()
            if not any(one == server for one in self.servers.all):
                raise GymFault(f"{server.instance} was started anew in between", "anew")
            try:
                answer = await self.link.ask(server.url + path, body, limit=limit, cookies=cookies)
            except GymFault as fault:
                problem = GymFault(f"{server.instance}: {fault}", fault.kind)
                await self._doubt()
                hangs = fault.kind == "late" and path != SEED  # what hung a server would hang it again
                if hangs or (fault.kind == "lost" and not repeat):
                    raise problem from None
                continue
            self._in_a_row = 0
            if answer.status_code not in BUSY and not (repeat and answer.status_code >= 500):
                return answer
            problem = GymFault(f"{server.instance}: {path}: {said(answer)}")
        raise problem

    async def _until_well(self) -> None:
        """Wait while servers of ours are started anew."""
        await self._well.wait()
        if self._broken is not None:
            raise self._broken

    async def _doubt(self) -> None:
        """After a fault: have servers of ours looked at, and find out whether others have been started anew."""
        if self.process is not None:
            self._suspected.set()
            await asyncio.sleep(0.1)
            return
        with contextlib.suppress(GymFault):
            self.servers = await discover(self.link, self.head)

    async def _meet(self) -> None:
        """Wait until the head server lists servers and all of them answer."""
        clock = asyncio.get_running_loop().time
        began, told = clock(), False
        while True:
            if self.process is not None and self.process.ended():
                raise UserError(f"the Gym's servers ended: {self.process.last_words()}. See {self.process.log}.")
            self.link = GymClient(self._socket)
            try:
                servers = await discover(self.link, self.head)
                asked = [one for one in servers.all if one.kind in (RESOURCES, AGENTS)]
                await asyncio.gather(*(self.link.ask(f"{one.url}/", limit=self._liveness) for one in asked))
                self.servers = servers
                return
            except GymFault as fault:
                await self.link.close()
                if clock() - began > self.patience:
                    raise UserError(self._absent(fault)) from None
            if not told:
                told = True
                logger.info("waiting for the servers of NeMo Gym at %s, up to %.0f seconds", self.head, self.patience)
            await asyncio.sleep(1.0)

    def _absent(self, fault: GymFault) -> str:
        text = f"NeMo Gym at {self.head} does not answer within {self.patience:.0f} seconds: {fault}."
        if self.process is not None:
            return f"{text} See {self.process.log}, or raise 'nemo_gym_server_timeout'."
        return f"{text} Start it with ng_run, mend 'nemo_gym_head_port', or set 'nemo_gym_auto_start: true'."

    async def _keep(self) -> None:
        """Look after servers of ours: start them anew when one has died or hangs."""
        assert self.process is not None
        while True:
            # Not `wait_for`: where the event is set already, it loses the cancellation that ends this.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH):
                    await self._suspected.wait()
            self._suspected.clear()
            problem = "they ended" if self.process.ended() else await self._ailing()
            if problem is None:
                continue
            self._in_a_row += 1
            logger.warning("warning: starting the servers of NeMo Gym anew: %s", problem)
            self._well.clear()
            old = self.link
            await asyncio.to_thread(self.process.end)
            try:
                if self._in_a_row > MOST_RESTARTS:
                    raise UserError(f"the Gym's servers were started {MOST_RESTARTS} times in vain; see their log.")
                self.process.spawn()
                await self._meet()
            except UserError as error:
                self._broken = error
                return
            finally:
                self._well.set()
                await old.close()

    async def _ailing(self) -> str | None:
        """What is wrong with a server, asked of each whether it is there."""

        async def ask(server: Server) -> str | None:
            try:
                await self.link.ask(f"{server.url}/", limit=self._liveness, queues=False)
            except GymFault as fault:
                return f"{server.instance}: {fault}"
            return None

        asked = [one for one in self.servers.all if one.kind in (RESOURCES, AGENTS)]
        return next((one for one in await asyncio.gather(*map(ask, asked)) if one is not None), None)
