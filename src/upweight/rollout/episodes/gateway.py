"""A loopback endpoint through which a Gym's model proxy reaches the policy under whatever name vLLM serves it."""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rollout.sampling_params import sampling_fields
from upweight.rollout.vllm.client import RequestFailed, RequestRefused
from upweight.rollout.vllm.server import VllmServer
from upweight.types import Sampling

LARGEST = 64 << 20  # bytes of a request
REMEMBERED = 100_000  # turns whose policy version is kept
CHAT = "/v1/chat/completions"


class PolicyGateway:
    """Forwards chat requests to the policy on the vLLM server, with the sampling parameters of the run."""

    def __init__(self, server: VllmServer, port: int, template_args: Mapping[str, Any]) -> None:
        self.server, self.port, self.template_args = server, port, dict(template_args)
        self.sampling: Sampling | None = None
        self._versions: dict[int, int] = {}  # by the hash of a turn's log-probs, which the Gym returns unchanged
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The address that is `policy_base_url` in a Gym's config."""
        return f"http://127.0.0.1:{self.port}/v1"

    def open(self) -> None:
        """Start listening."""
        if self._listener is None:
            self._listener = self.server.client.run(self._listen())

    def close(self) -> None:
        """Stop listening."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self.server.client.run(self._close(listener))

    def version_of(self, logps: Sequence[float], otherwise: int) -> int:
        """The version of the policy that wrote a turn with these log-probs."""
        return self._versions.get(hash(tuple(logps)), otherwise)

    async def _listen(self) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        except OSError as error:
            raise UserError(f"nemo_gym_policy_port: {self.port} cannot be listened on: {error}") from None

    async def _close(self, listener: asyncio.Server) -> None:
        listener.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, *_ = head[0].split()
            lengths = [line.partition(":")[2] for line in head[1:] if line.lower().startswith("content-length:")]
            length = int(lengths[0]) if lengths else 0
            body = await reader.readexactly(length) if length <= LARGEST else b""
            status, answer = await self._answer(method, path, body)
            content = json.dumps(answer).encode()
            kept = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close"
            writer.write(f"HTTP/1.1 {status} -\r\n{kept}\r\n\r\n".encode() + content)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and content for a request; errors of the server keep their status for the proxy to act on."""
        if method == "GET":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model"}], "status": "ok"}
        try:
            request = json.loads(body)
            if path == CHAT:
                request |= self._fields() | self.server.options
            elif path != "/tokenize":
                return 404, {"error": {"message": f"there is no {path}"}}
            if self.template_args:
                request["chat_template_kwargs"] = {**self.template_args, **(request.get("chat_template_kwargs") or {})}
            return 200, await self.server.request(path, request, self._remember_version)
        except RequestRefused as error:
            # The Gym answers its caller with a bare 500: here is the last place that knows the reason.
            warn_once(f"the vLLM server refuses a request of the Gym's agents: {error}")
            return error.status, {"error": {"message": str(error), "code": error.status}}
        except (RequestFailed, UserError) as error:
            return 500, {"error": {"message": str(error), "code": 500}}
        except (ValueError, TypeError) as error:
            return 400, {"error": {"message": f"no request: {error}", "code": 400}}

    def _remember_version(self, answer: Any, version: int) -> Any:
        """The answer unchanged; the version of the policy that wrote it is remembered."""
        for choice in answer.get("choices") or ():
            tokens = (choice.get("logprobs") or {}).get("content") or ()
            self._versions[hash(tuple(entry["logprob"] for entry in tokens))] = version
        while len(self._versions) > REMEMBERED:
            del self._versions[next(iter(self._versions))]
        return answer

    def _fields(self) -> dict[str, Any]:
        """Fields that every request gets: the run's sampling parameters, and token ids in the answer."""
        return sampling_fields(self.sampling or Sampling(256)) | {
            "max_completion_tokens": None,
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
