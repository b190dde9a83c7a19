"""HTTP requests to the Gym's servers, with time limits and typed faults."""

import asyncio
import contextlib
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Literal

import httpx

CONCURRENT = 64  # requests at a time
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

    def __init__(self, socket: str | None = None) -> None:
        """`socket`: file through which servers without a network are reached."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENT)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=False),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=None,
        )
        self._room = asyncio.Semaphore(CONCURRENT)

    async def ask(
        self, url: str, body: Any = None, *, limit: float, cookies: httpx.Cookies | None = None, queues: bool = True
    ) -> httpx.Response:
        """One request, with POST where there is a body; the limit begins when it is sent."""
        place = url.partition("://")[2].partition("/")[2] or "its address"
        request = self._http.build_request("GET" if body is None else "POST", url, json=body)
        if cookies is not None:
            cookies.set_cookie_header(request)
        async with self._room if queues else contextlib.nullcontext():
            try:
                async with asyncio.timeout(limit):
                    answer = await self._http.send(request)
            except TimeoutError:
                raise GymFault(f"/{place}: no answer within {limit:g} seconds", "late") from None
            except httpx.ConnectError as error:
                raise GymFault(f"/{place}: {error}", "unreached") from None
            except httpx.HTTPError as error:
                raise GymFault(f"/{place}: {type(error).__name__}: {error}", "lost") from None
        if answer.status_code == DOWN:
            raise GymFault(f"/{place}: nothing listens there", "unreached")
        if cookies is not None:
            cookies.extract_cookies(answer)
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def excerpt(answer: httpx.Response) -> str:
    """Status and beginning of an answer, for messages."""
    return f"{answer.status_code} {' '.join(answer.text.split())[:200]}".rstrip()
