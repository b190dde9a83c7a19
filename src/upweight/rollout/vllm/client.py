"""HTTP to a vLLM server: requests from a thread of their own, and what the server says about itself."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from upweight.errors import UserError
from upweight.event_loop import EventLoop
from upweight.log import logger

T = TypeVar("T")
ANSWER = 30.0  # seconds for a question that needs no generation
LOAD = 600.0  # seconds for loading weights
BACKOFF = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts


class RequestRefused(Exception):
    """The server understood a request and said no: asking again is of no use."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class RequestFailed(Exception):
    """No answer, or an error inside the server, which then has a status: it may go better later."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerIdentity:
    """Which run of the server answers, and how many tokens it has written; None where it does not say."""

    began: float | None
    tokens: float | None


class VllmClient:
    """A server's address, and the thread that talks to it."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout = url, timeout
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # Proxies of the environment are for the outside world, not for a server next door.
        self._http = httpx.AsyncClient(base_url=url, limits=limits, trust_env=False)
        self._loop = EventLoop("vllm")

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin some work on the thread."""
        return self._loop.start(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Work done on the thread, waited for."""
        return self.start(work).result()

    async def ask(self, path: str, body: Any = None, *, seconds: float | None = ANSWER) -> Any:
        """One request, with POST where there is a body; the answer as JSON, or as text where it is none."""
        limits = httpx.Timeout(seconds, connect=10.0)
        try:
            if body is None:
                answer = await self._http.get(path, timeout=limits)
            else:
                answer = await self._http.post(path, json=body, timeout=limits)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code >= 500 or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise RequestFailed(f"{path}: {answer.status_code} {_message(answer)}", answer.status_code)
        if answer.is_error:
            raise RequestRefused(answer.status_code, _message(answer))
        try:
            return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        except ValueError as error:
            raise RequestFailed(f"{path}: the answer is no JSON") from error

    async def identity(self) -> ServerIdentity:
        """Which run of the server this is and how far it has come."""
        try:
            text = str(await self.ask("/metrics"))
        except RequestRefused:
            return ServerIdentity(None, None)
        began = re.search(r"^process_start_time_seconds (\S+)", text, re.MULTILINE)
        tokens = re.findall(r"^vllm:generation_tokens_total\S* (\S+)", text, re.MULTILINE)
        return ServerIdentity(float(began[1]) if began else None, sum(map(float, tokens)) if tokens else None)

    async def until_healthy(self, since: float | None = None) -> None:
        """Wait until the server is well, up to the time limit, counted from `since` on the loop's clock."""
        retry = Retry(self, since)
        while True:
            try:
                await self.ask("/health")
                return
            except RequestRefused as error:
                raise UserError(f"{self.url} is no vLLM server: /health answers {error}") from None
            except RequestFailed as error:
                if not retry.attempts:
                    logger.info("waiting for a vLLM server at %s, up to %.0f seconds", self.url, self.timeout)
                await retry.wait_or_raise(error)

    async def retry_until_answered(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        since: float | None = None,
        again: tuple[type[Exception], ...] = (RequestFailed,),
    ) -> T:
        """Some questions, put to a server that is well until they are answered or the time is up."""
        retry = Retry(self, since)
        while True:
            await self.until_healthy(retry.since)
            try:
                return await work()
            except again as error:
                await retry.wait_or_raise(error)


class Retry:
    """Failures borne for as long as a link waits, counted from `since` on the loop's clock, with growing pauses."""

    def __init__(self, client: VllmClient, since: float | None = None) -> None:
        self._client, self._clock = client, asyncio.get_running_loop().time
        self.since = self._clock() if since is None else since
        self.attempts = 0

    async def wait_or_raise(self, problem: Exception) -> None:
        """Pause before the next attempt; raise where the time is up."""
        if self._clock() - self.since > self._client.timeout:
            raise UserError(unreachable(self._client.url, self._client.timeout, problem)) from None
        await asyncio.sleep(backoff(self.attempts))
        self.attempts += 1


def backoff(attempt: int) -> float:
    """Seconds before the next attempt."""
    return BACKOFF[min(attempt, len(BACKOFF) - 1)]


def unreachable(url: str, seconds: float, error: BaseException | str) -> str:
    """One line on a server that does not answer, and the remedy."""
    return (
        f"the vLLM server at {url} has not answered for {seconds:g} seconds ({error}). Start it with "
        "`upweight vllm-serve`, check trl.vllm_server_host and trl.vllm_server_port, or raise trl.vllm_server_timeout; "
        "then go on with --resume."
    )


def _message(answer: httpx.Response) -> str:
    """What the server says is wrong, in one line."""
    try:
        found = answer.json()
        error = found.get("error", found)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:300]
