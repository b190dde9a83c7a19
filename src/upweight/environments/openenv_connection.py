"""The WebSocket protocol of OpenEnv: each connection is one environment, with reset and step."""

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping
from typing import Any

import httpx

from upweight.errors import UserError
from upweight.log import logger, warn_once

try:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake
except ImportError:
    raise UserError("environment.type: openenv needs the package `websockets`: pip install websockets") from None

MIN_BACKOFF, MAX_BACKOFF = 0.05, 2.0  # seconds between attempts to connect
CLOSE_SECONDS = 2.0
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class OpenEnvFault(Exception):
    """The environment failed, so the episode says nothing about the policy."""


class ActionRejected(Exception):
    """The environment rejected an action as invalid."""


class _ServerFull(Exception):
    """All sessions of the server are in use."""


class OpenEnvServer:
    """The address and the timeouts of an OpenEnv server."""

    def __init__(self, url: str, timeout: float, wait: float) -> None:
        address = httpx.URL(url if "://" in url else f"http://{url}")
        if address.scheme not in ("http", "https", "ws", "wss") or not address.host:
            raise UserError(f"environment.url: '{url}' is no address; write it like http://127.0.0.1:8000")
        safe = "s" if address.scheme in ("https", "wss") else ""
        path = address.path.removesuffix("/ws").rstrip("/")
        self.url = str(address.copy_with(scheme=f"http{safe}", path=path or "/")).rstrip("/")
        self.socket = str(address.copy_with(scheme=f"ws{safe}", path=f"{path}/ws"))
        self.local = address.host in LOCAL_HOSTS  # the proxies of environment variables are for other hosts
        self.timeout, self.wait = timeout, wait

    async def schema(self) -> dict[str, Any]:
        """Wait for the server and return the schemas of its actions and observations."""
        clock = asyncio.get_running_loop().time
        stop = clock() + self.wait
        async with httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=not self.local) as http:
            attempt = 0
            while True:
                try:
                    (await http.get("/health")).raise_for_status()
                    answer = (await http.get("/schema")).raise_for_status().json()
                    break
                except (httpx.HTTPError, ValueError) as error:
                    if clock() > stop:
                        raise UserError(
                            f"environment.url: no OpenEnv server answers at {self.url} ({type(error).__name__} {error})"
                            f" after {self.wait:g} seconds. Start it, or raise environment.wait."
                        ) from None
                if attempt == 0:
                    logger.info("waiting for an OpenEnv server at %s, up to %.0f seconds", self.url, self.wait)
                await asyncio.sleep(_backoff(attempt))
                attempt += 1
        if not isinstance(answer, dict) or not isinstance(answer.get("action"), dict):
            raise UserError(f"environment.url: {self.url} is no OpenEnv server: /schema names no action")
        return answer


class OpenEnvConnection:
    """One connection, which is one environment."""

    def __init__(self, server: OpenEnvServer) -> None:
        self.server = server
        self._socket: Any = None

    async def reset(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode; wait while the server is away or full."""
        clock = asyncio.get_running_loop().time
        stop = clock() + self.server.wait
        attempt = 0
        while True:
            try:
                await self._connect()
                return await self._ask("reset", arguments)
            except (OSError, ConnectionClosed, InvalidHandshake, _ServerFull) as error:
                await self.close()
                if clock() > stop:
                    raise OpenEnvFault(f"no session within {self.server.wait:g} seconds: {error}") from error
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    async def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Return observation, reward and done after an action."""
        try:
            return await self._ask("step", action)
        except (OSError, ConnectionClosed) as error:
            raise OpenEnvFault(f"the connection was lost: {error}") from error

    async def close(self) -> None:
        """Release the session."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()
        except (OSError, ConnectionClosed):  # closed already
            socket.transport.abort()

    async def _connect(self) -> None:
        self._socket = await connect(
            self.server.socket,
            open_timeout=self.server.timeout,
            max_size=None,
            ping_interval=None,  # a busy environment may not answer pings; each message has a timeout
            proxy=None if self.server.local else True,
        )

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(ConnectionClosed):  # a full server sends its error and closes; that is still read
            await self._socket.send(json.dumps({"type": kind, "data": dict(data)}, default=str))
        try:
            async with asyncio.timeout(self.server.timeout):
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            raise OpenEnvFault(f"no answer to '{kind}' within {self.server.timeout:g} seconds") from None
        except ValueError as error:
            raise OpenEnvFault(f"the answer to '{kind}' is no JSON: {error}") from error
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise OpenEnvFault(f"the answer to '{kind}' is no OpenEnv message")
        if answer["type"] == "error":
            raise _error(content)
        return content


def _error(content: Mapping[str, Any]) -> Exception:
    """Return the exception for an error message of the server."""
    code, message = content.get("code"), str(content.get("message", ""))
    if code == "VALIDATION_ERROR":
        faults = [
            f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg')}" for fault in content.get("errors") or ()
        ]
        return ActionRejected("; ".join(faults) or message)
    if code == "CAPACITY_REACHED":
        warn_once(
            f"the OpenEnv server has room for {content.get('max_sessions', 'few')} sessions only, and others wait: "
            "raise max_concurrent_envs in its create_app (the class needs SUPPORTS_CONCURRENT_SESSIONS = True)"
        )
        return _ServerFull(message)
    return OpenEnvFault(f"{code}: {message}")


def _backoff(attempt: int) -> float:
    return min(MIN_BACKOFF * 2 ** min(attempt, 10), MAX_BACKOFF) * random.uniform(0.5, 1.0)
