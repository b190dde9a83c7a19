"""An HTTP client of a vLLM server: requests, retries, and the server's health and identity."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import httpx

from upweight.errors import UserError
from upweight.event_loop import EventLoop
from upweight.heartbeat import activity
from upweight.log import logger
from upweight.runs.command import resume_advice

T = TypeVar("T")
ANSWER_SECONDS = 30.0  # seconds for a request without generation
LOAD_SECONDS = 600.0  # seconds for loading weights, where the limit of the client is lower
WITHOUT_SERVER = "`trl.use_vllm: false` samples in this process, without vLLM"
BACKOFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts


class RequestRefused(Exception):
    """The server rejected a request; a retry would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class RequestFailed(Exception):
    """There was no answer, or an error inside the server, which then has a status; a retry may succeed."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerIdentity(NamedTuple):
    """The start time of the server process and its count of generated tokens; None where not reported."""

    began: float | None
    tokens: float | None


class VllmClient:
    """Sends requests to one server from one thread."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout, self.load_seconds = url, timeout, max(LOAD_SECONDS, timeout)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # The proxies of environment variables are not meant for a server on the local network.
        self._http = httpx.AsyncClient(base_url=url, limits=limits, trust_env=False)
        self._loop = EventLoop("vllm")

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return self._loop.start(work)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result()

    async def ask(self, path: str, body: Any = None, *, seconds: float | None = ANSWER_SECONDS) -> Any:
        """Send a GET request, or a POST with a body; return the answer as JSON, or else as text."""
        limits = httpx.Timeout(seconds, connect=10.0)
        try:
            answer = await self._http.request("GET" if body is None else "POST", path, json=body, timeout=limits)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code >= 500 or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise RequestFailed(f"{path}: {answer.status_code} {_error_message(answer)}", answer.status_code)
        if answer.is_error:
            raise RequestRefused(answer.status_code, _error_message(answer))
        try:
            return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        except (ValueError, RecursionError) as error:
            raise RequestFailed(f"{path}: the answer is no JSON") from error

    async def identity(self) -> ServerIdentity:
        """Return the server's start time and token count from its metrics."""
        try:
            text = str(await self.ask("/metrics"))
        except RequestRefused:
            return ServerIdentity(None, None)
        began = re.search(r"^process_start_time_seconds (\S+)", text, re.MULTILINE)
        tokens = re.findall(r"^vllm:generation_tokens_total\S* (\S+)", text, re.MULTILINE)
        return ServerIdentity(float(began[1]) if began else None, sum(map(float, tokens)) if tokens else None)

    async def until_healthy(self, since: float | None = None) -> None:
        """Wait until the server is healthy, up to the time limit, counted from `since` on the loop's clock."""
        retry = Retry(self, since)
        limit = f"trl.vllm_server_timeout: {self.timeout:g} s"
        with activity(f"waiting for the vLLM server at {self.url} ({limit})", progresses=False):
            while True:
                try:
                    await self.ask("/health")
                    return
                except RequestRefused as error:
                    raise UserError(f"{self.url} is no vLLM server: /health answers {error}") from None
                except RequestFailed as error:
                    if not retry.attempts:
                        remedy = f"if none runs: `upweight vllm-serve CONFIG` in another terminal; {WITHOUT_SERVER}"
                        logger.info("waiting for a vLLM server at %s, up to %.0f s; %s", self.url, self.timeout, remedy)
                    await retry.wait_or_raise(error)

    async def retry_until_answered(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        since: float | None = None,
        again: tuple[type[Exception], ...] = (RequestFailed,),
    ) -> T:
        """Run requests on a healthy server, and retry errors of the types `again` until the time limit."""
        retry = Retry(self, since)
        while True:
            await self.until_healthy(retry.since)
            try:
                return await work()
            except again as error:
                await retry.wait_or_raise(error)


class Retry:
    """Waits between attempts with exponential backoff, until the client's time limit, counted from `since`."""

    def __init__(self, client: VllmClient, since: float | None = None) -> None:
        self._client, self._clock = client, asyncio.get_running_loop().time
        self.since = self._clock() if since is None else since
        self.attempts = 0

    async def wait_or_raise(self, problem: Exception) -> None:
        """Wait before the next attempt, or raise a UserError after the time limit."""
        if self._clock() - self.since > self._client.timeout:
            raise UserError(unreachable(self._client.url, self._client.timeout, problem)) from None
        await asyncio.sleep(backoff(self.attempts))
        self.attempts += 1


def backoff(attempt: int) -> float:
    return BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)]


def unreachable(url: str, seconds: float, error: BaseException | str) -> str:
    """Return the error message for a server that does not answer, with the remedy."""
    return (
        f"the vLLM server at {url} has not answered for {seconds:g} seconds ({error}). Start it with "
        "`upweight vllm-serve`, check trl.vllm_server_host and trl.vllm_server_port, or raise trl.vllm_server_timeout; "
        f"then {resume_advice()}. {WITHOUT_SERVER}."
    )


def _error_message(answer: httpx.Response) -> str:
    """Return the error message of an answer, in one line."""
    try:
        content = answer.json()
        error = content.get("error", content)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:300]
