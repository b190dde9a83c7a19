"""A door on loopback through which a Gym's model proxy reaches the policy, whatever its name on the server is now."""

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
REMEMBERED = 100_000  # turns whose version is known
CHAT = "/v1/chat/completions"


class PolicyGateway:
    """Passes chat requests on to the vLLM server, as the version of the policy that is served, sampled as asked."""

    def __init__(self, server: VllmServer, port: int, template_args: Mapping[str, Any]) -> None:
        self.server, self.port, self.template_args = server, port, dict(template_args)
        self.sampling: Sampling | None = None
        self._versions: dict[int, int] = {}  # of turns, by their log-probs: the Gym hands those on as they are
        self._door: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """What a Gym's config calls `policy_base_url`."""
        return f"http://127.0.0.1:{self.port}/v1"

    def open(self) -> None:
        """Begin to listen."""
        if self._door is None:
            self._door = self.server.client.run(self._listen())

    def close(self) -> None:
        """Listen no more."""
        door, self._door = self._door, None
        if door is not None:
            self.server.client.run(self._shut(door))

    def version_of(self, logps: Sequence[float], otherwise: int) -> int:
        """The version of the policy that wrote a turn with these log-probs."""
        return self._versions.get(hash(tuple(logps)), otherwise)

    async def _listen(self) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        except OSError as error:
            raise UserError(f"nemo_gym_policy_port: {self.port} cannot be listened on: {error}") from None

    async def _shut(self, door: asyncio.Server) -> None:
        door.close()

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
        """Status and content for a request; what the server refuses keeps its status, so that the proxy knows why."""
        if method == "GET":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model"}], "status": "ok"}
        try:
            asked = json.loads(body)
            if path == CHAT:
                asked |= self._fields() | self.server.options
            elif path != "/tokenize":
                return 404, {"error": {"message": f"there is no {path}"}}
            if self.template_args:
                asked["chat_template_kwargs"] = {**self.template_args, **(asked.get("chat_template_kwargs") or {})}
            return 200, await self.server.request(path, asked, self._noted)
        except RequestRefused as error:
            # The Gym answers its caller with a bare 500: here is the last place that knows the reason.
            warn_once(f"the vLLM server refuses a request of the Gym's agents: {error}")
            return error.status, {"error": {"message": str(error), "code": error.status}}
        except (RequestFailed, UserError) as error:
            return 500, {"error": {"message": str(error), "code": 500}}
        except (ValueError, TypeError) as error:
            return 400, {"error": {"message": f"no request: {error}", "code": 400}}

    def _noted(self, answer: Any, version: int) -> Any:
        """An answer as it is; which version wrote it is remembered."""
        for choice in answer.get("choices") or ():
            said = (choice.get("logprobs") or {}).get("content") or ()
            self._versions[hash(tuple(entry["logprob"] for entry in said))] = version
        while len(self._versions) > REMEMBERED:
            del self._versions[next(iter(self._versions))]
        return answer

    def _fields(self) -> dict[str, Any]:
        """How the policy is sampled, whoever asks, and that tokens come back as they were written."""
        return sampling_fields(self.sampling or Sampling(256)) | {
            "max_completion_tokens": None,
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
