"""Rollouts by a Gym's agents; through the Gym's proxy they reach a loopback endpoint here, which asks the policy."""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from upweight.data.formats.nemo_gym import PARAMS, row_of
from upweight.environments.nemo_gym.gym import NemoGym
from upweight.environments.nemo_gym.responses import is_finished, messages_of, turns_of, verification_of
from upweight.environments.nemo_gym.servers import GymFault, GymServer
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.rollout.episodes.loop import EpisodeResult
from upweight.rollout.episodes.runner import EnvironmentLoop, fill_group, gather_or_cancel
from upweight.rollout.episodes.token_stream import TokenStream
from upweight.rollout.sampling_params import sampling_fields
from upweight.rollout.vllm.client import RequestFailed, RequestRefused
from upweight.rollout.vllm.server import VllmServer
from upweight.types import Completion, Group, GroupDone, Sampling

MAX_CONCURRENT = 256  # rollouts at a time
MAX_REQUEST_BYTES = 64 << 20  # bytes of a request
MAX_TURNS_KEPT = 100_000  # turns whose policy version is kept
CHAT = "/v1/chat/completions"
TOKEN_FIELDS = {  # of every chat request, for token ids and log-probs in the answer
    "max_completion_tokens": None,
    "logprobs": True,
    "top_logprobs": 0,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
}


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

        async def listen() -> asyncio.Server:
            try:
                return await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            except OSError as error:
                raise UserError(f"nemo_gym_policy_port: {self.port} cannot be listened on: {error}") from None

        if self._listener is None:
            self._listener = self.server.client.run(listen())

    def close(self) -> None:
        listener, self._listener = self._listener, None

        async def stop() -> None:
            if listener is not None:
                listener.close()

        self.server.client.run(stop())

    def version_of(self, logps: Sequence[float], otherwise: int) -> int:
        """The version of the policy that wrote a turn with these log-probs."""
        return self._versions.get(hash(tuple(logps)), otherwise)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, *_ = head[0].split()
            lengths = [line.partition(":")[2] for line in head[1:] if line.lower().startswith("content-length:")]
            length = int(lengths[0]) if lengths else 0
            body = await reader.readexactly(length) if length <= MAX_REQUEST_BYTES else b""
            status, answer = await self._answer_request(method, path, body)
            content = json.dumps(answer).encode()
            kept = f"content-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close"
            writer.write(f"HTTP/1.1 {status} -\r\n{kept}\r\n\r\n".encode() + content)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()

    async def _answer_request(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and content for a request; errors of the server keep their status for the proxy to act on."""
        if method == "GET":
            return 200, {"object": "list", "data": [{"id": "policy", "object": "model"}], "status": "ok"}
        try:
            request = json.loads(body)
            if path == CHAT:
                request |= sampling_fields(self.sampling or Sampling(256)) | TOKEN_FIELDS | self.server.options
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
        while len(self._versions) > MAX_TURNS_KEPT:
            del self._versions[next(iter(self._versions))]
        return answer


@dataclass
class GymAgents:
    """Fills groups with completions; each is one `/run` of an agent."""

    environment: NemoGym
    gateway: PolicyGateway | None  # None where another process samples

    def __post_init__(self) -> None:
        self._loop = EnvironmentLoop(self.environment)

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        assert self.gateway is not None, "this process does not sample"
        self.gateway.sampling = sampling
        self.gateway.open()
        work = self._loop.started().start(self._play_all(groups, count, sampling))
        try:
            episodes = work.result()
        finally:
            work.cancel()
        for index, group in enumerate(groups):
            fill_group(group, episodes[index * count : (index + 1) * count])
            if done is not None:
                done(index)

    def close(self) -> None:
        """Stop the servers and the gateway; a later call starts them again."""
        self._loop.close()
        if self.gateway is not None:
            self.gateway.close()

    async def _play_all(self, groups: Sequence[Group], count: int, sampling: Sampling) -> list[EpisodeResult]:
        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def rollout(group: Group) -> EpisodeResult:
            async with slots:
                return await self._play(group.row, sampling)

        return await gather_or_cancel(rollout(group) for group in groups for _ in range(count))

    async def _play(self, row: Mapping[str, Any], sampling: Sampling) -> EpisodeResult:
        """One rollout; a fault of the Gym becomes its `failure`."""
        gateway = self.gateway
        assert gateway is not None
        section, played = self.environment.section, EpisodeResult()
        name = self.environment.server_name(row)
        began, version = time.monotonic(), gateway.server.version()
        try:
            await self.environment.until_healthy()
            agent = self.environment.servers.agent(name)
            self._check_policy(agent, gateway)
            # nemo_gym_verify_timeout bounds `/run` too where it is the only limit that is set.
            only_verify = "verify_timeout" in section.model_fields_set and "run_timeout" not in section.model_fields_set
            limit = section.verify_timeout if only_verify else section.run_timeout
            body = _request_body(row_of(row), sampling)
            answer = await self.environment.post(agent, "/run", body, limit=limit, repeat=False)
            run = verification_of(answer)
            played.stream, played.turns = _tokens_of_run(run, gateway, version)
            played.messages, played.finished = messages_of(run), is_finished(run)
            played.calls = sum("tool_calls" in message for message in played.messages)
            if section.max_turns is not None and played.turns > section.max_turns:
                raise GymFault(f"{played.turns} turns where nemo_gym_max_turns allows {section.max_turns}")
            played.outcome = self.environment.outcome_of(run, name)
        except GymFault as fault:
            warn_once(f"NeMo Gym: {name}: {fault}; such samples are left out (environment/masked counts them)")
            played.failure = f"{name}: {fault}"
        played.seconds = time.monotonic() - began
        return played

    def _check_policy(self, agent: GymServer, gateway: PolicyGateway) -> None:
        """Refuse an agent whose model proxy sends requests to another model than the policy."""
        proxy, server = self.environment.servers.proxy_of.get(agent.instance), gateway.server
        if proxy is None or _host_and_port(proxy.url) == _host_and_port(gateway.url):
            return
        name, problem = server.served_name(), None
        if _host_and_port(proxy.url) != _host_and_port(server.client.url):
            problem = f"{proxy.url}, where the policy is not"
        elif name is None:
            problem = f"vLLM for '{proxy.model}', but adapters have a new name there after each sync"
        elif proxy.model != name:
            problem = f"vLLM for '{proxy.model}', but the policy is '{name}' there"
        if problem is not None:
            raise UserError(
                f"nemo_gym_multi_turn: the agent '{agent.instance}' asks {problem}. Start the Gym with "
                f"'++{proxy.url_key}={gateway.url}' added to its ng_run line: the run passes requests at that address "
                "on to the present weights of the policy."
            )


def _host_and_port(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return "127.0.0.1" if parts.hostname in ("localhost", "0.0.0.0") else parts.hostname, parts.port


def _request_body(row: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """The row with the sampling parameters of the policy."""
    limit = sampling.max_new_tokens
    params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_output_tokens": limit}
    tools = [{"strict": False, **tool} for tool in row[PARAMS].get("tools") or ()]  # the Gym insists on the field
    return {**row, PARAMS: {**row[PARAMS], **params, **({"tools": tools} if tools else {})}}


def _tokens_of_run(run: Mapping[str, Any], gateway: PolicyGateway, version: int) -> tuple[TokenStream, int]:
    """The tokens of a rollout and its number of turns; `version` is the policy's where the gateway knows no other."""
    # A turn whose prompt does not continue the tokens of the turn before begins a new sequence.
    turns = turns_of(run)
    stream = TokenStream(turns[0].prompt)
    for number, turn in enumerate(turns):
        if number:
            known = len(stream.ids)
            if turn.prompt[:known] == stream.ids:
                stream.append_observation(turn.prompt[known:])
            else:
                stream.restart(turn.prompt)
        versions = [gateway.version_of(turn.logps, version)] * len(turn.ids)
        logps = turn.logps if gateway.server.weights.reports_sampler_logps else []
        stream.append_sampled(Completion(turn.ids, logps, versions, finished=True))
    return stream, len(turns)
