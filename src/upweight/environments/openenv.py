"""Episodes on an OpenEnv server, with typed actions or MCP tools and a reward for each step."""

import asyncio
import contextlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.environments.episode import Environment, Episode, EpisodeOutcome, Message, Opening, Reply, ToolCall, Turn
from upweight.environments.openenv_images import block_content, image_part, with_images
from upweight.environments.tools import as_text, is_image, opening_messages, tool_message
from upweight.errors import UserError
from upweight.heartbeat import activity
from upweight.log import logger, warn_once

try:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake
except ImportError:
    raise UserError("environment.type: openenv needs the package `websockets`: pip install websockets") from None

REWARD = "openenv"
STEP = "step"  # name of the tool that takes a typed action
ERROR = "error: "  # prefix of what the policy did wrong
SCALARS = ("string", "integer", "number", "boolean")
MODEL_ERRORS = ("invalid_args", "tool_not_found", "execution_error")
Reduction = Literal["sum", "last", "mean", "max"]
MIN_BACKOFF, MAX_BACKOFF = 0.05, 2.0  # seconds between attempts to connect
CLOSE_SECONDS = 2.0
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
Content = str | list[dict[str, Any]]  # of a message; parts where there are images


class OpenEnvFault(Exception):
    """The environment failed, so the episode says nothing about the policy."""


class ActionRejected(Exception):
    """The environment rejected an action as invalid."""


class _ServerFull(Exception):
    """All sessions of the server are in use."""


@dataclass
class OpenEnv(Environment):
    """An OpenEnv server; each WebSocket connection to it is one environment, and each episode has one."""

    url: str
    reward: Reduction = "sum"  # how the step rewards of an episode are combined
    columns: Sequence[str] | None = None  # of the row, passed to `reset`; None: all but the prompt
    text_field: str | None = None  # field of the action for the policy's text; None: the only one, if any
    observation: str | None = None  # field of the observation that the policy reads; None: all
    image: str | None = None  # field of the observation that holds an image
    timeout: float = 60.0  # seconds for one answer
    wait: float = 300.0  # seconds to wait for the server and for a free session
    mcp: bool = field(default=False, init=False)  # whether turns become actions by calls of MCP tools
    tools: Sequence[Mapping[str, Any]] = field(default=(), init=False)  # `step`, where it takes several fields

    def __post_init__(self) -> None:
        address = httpx.URL(self.url if "://" in self.url else f"http://{self.url}")
        if address.scheme not in ("http", "https", "ws", "wss") or not address.host:
            raise UserError(f"environment.url: '{self.url}' is no address; write it like http://127.0.0.1:8000")
        safe = "s" if address.scheme in ("https", "wss") else ""
        path = address.path.removesuffix("/ws").rstrip("/")
        self.url = str(address.copy_with(scheme=f"http{safe}", path=path or "/")).rstrip("/")
        self.socket = str(address.copy_with(scheme=f"ws{safe}", path=f"{path}/ws"))
        self.local = address.host in LOCAL_HOSTS  # the proxies of environment variables are for other hosts

    @property
    def reward_names(self) -> Sequence[str]:
        return (REWARD,)

    def episode(self) -> "OpenEnvEpisode":
        return OpenEnvEpisode(self)

    async def start(self) -> None:
        """Wait for the server; by its schema, turns act through MCP tools, as the text of one field, or by `step`."""
        with activity(f"waiting for the OpenEnv server at {self.url} (environment.wait: {self.wait:g} s)"):
            schema = await self._fetch_schemas()
        known = (schema.get("observation") or {}).get("properties") or {}
        for key, name in (("observation", self.observation), ("image", self.image)):
            if name is not None and known and name not in known:
                problem = f"'{name}' is no field of what {self.url} shows"
                raise UserError(f"environment.{key}: {problem}; it has {', '.join(known)}")
        action = schema["action"]
        properties = (action.get("properties") or {}).items()
        fields = {name: kind for name, kind in properties if name != "metadata" and "const" not in kind}
        if self.text_field is not None and self.text_field not in fields:
            problem = f"the environment's action has no field '{self.text_field}'"
            raise UserError(f"environment.text_field: {problem}; it has {', '.join(fields) or 'none'}")
        self.mcp = not fields or {"tool_name", "arguments"} == set(fields)
        if self.mcp:
            self.text_field = None
        elif self.text_field is None and len(fields) == 1:
            (name, kind), *_ = fields.items()
            self.text_field = name if kind.get("type") in SCALARS else None
        if not self.mcp and self.text_field is None:
            required = [name for name in action.get("required") or () if name in fields]
            parameters = {"type": "object", "properties": fields, "required": required}
            parameters |= {"$defs": action["$defs"]} if "$defs" in action else {}
            self.tools = [_tool_schema(STEP, str(action.get("description") or "Act on the environment."), parameters)]

    async def _fetch_schemas(self) -> dict[str, Any]:
        """Wait for the server and return the schemas of its actions and observations."""
        clock, attempt = asyncio.get_running_loop().time, 0
        stop = clock() + self.wait
        async with httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=not self.local) as http:
            while True:
                try:
                    (await http.get("/health")).raise_for_status()
                    answer = (await http.get("/schema")).raise_for_status().json()
                    break
                except (httpx.HTTPError, ValueError) as error:
                    if clock() > stop:
                        problem = f"no OpenEnv server answers at {self.url} ({type(error).__name__} {error})"
                        remedy = "Start it, or raise environment.wait."
                        raise UserError(f"environment.url: {problem} after {self.wait:g} seconds. {remedy}") from None
                if attempt == 0:
                    logger.info("waiting for an OpenEnv server at %s, up to %.0f seconds", self.url, self.wait)
                await asyncio.sleep(_backoff(attempt))
                attempt += 1
        if not isinstance(answer, dict) or not isinstance(answer.get("action"), dict):
            raise UserError(f"environment.url: {self.url} is no OpenEnv server: /schema names no action")
        return answer


@dataclass
class OpenEnvEpisode(Episode):
    """One episode, over one connection."""

    environment: OpenEnv
    rewards: list[float] = field(default_factory=list)  # of the steps that returned one
    steps: int = 0
    done: bool = False
    socket: Any = None  # the connection

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Reset the environment with the row's columns; the first observation follows the prompt."""
        columns = self.environment.columns
        shown = any(map(is_image, row.get("images") or ()))  # the images of the row, which the policy alone sees
        if shown and "images" in (columns or ()):
            raise UserError("environment.columns: images of rows are not sent to a server; leave out 'images'.")
        unsent = (*PREPARED_COLUMNS, *(["images"] if shown else []))
        names = [name for name in row if name not in unsent] if columns is None else columns
        if missing := [name for name in names if name not in row]:
            has = ", ".join(row)
            raise UserError(f"environment.columns: the data has no column {', '.join(missing)}; it has {has}")
        arguments = {name: row[name] for name in names if row[name] is not None}
        try:
            result = await self._begin_episode(arguments)
        except ActionRejected as error:
            raise OpenEnvFault(f"reset was refused: {error}") from error
        tools = self.environment.tools
        if self.environment.mcp:
            listed = (await self._send_action({"type": "list_tools"})).get("observation") or {}
            offered = [(tool, tool.get("input_schema") or {}) for tool in listed.get("tools") or ()]
            tools = [_tool_schema(tool["name"], tool.get("description") or "", schema) for tool, schema in offered]
        return Opening(opening_messages(row.get("prompt"), self._content_of_result(result)), tools)

    async def reply(self, turn: Turn) -> Reply:
        """Step once with plain text, or once for each call; a turn without a call ends the episode."""
        name = self.environment.text_field
        if name is not None:
            content = await self._step({name: turn.text.strip()})
            return Reply() if self.done else Reply([{"role": "user", "content": content}])
        messages: list[Message] = []
        for call in turn.calls:
            messages.append(tool_message(call, await self._call_tool(call)))
            if self.done:
                break
        failed = sum(str(message["content"]).startswith(ERROR) for message in messages)
        return Reply([] if self.done else messages, failed)

    async def outcome(self) -> EpisodeOutcome:
        rewards = self.rewards or [0.0]
        total = sum(rewards)
        reductions = {"sum": total, "last": rewards[-1], "mean": total / len(rewards), "max": max(rewards)}
        details = {"step_rewards": list(self.rewards), "steps": self.steps, "done": self.done}
        return EpisodeOutcome({REWARD: reductions[self.environment.reward]}, details=details)

    async def close(self) -> None:
        socket, self.socket = self.socket, None
        if socket is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()
        except (OSError, ConnectionClosed):  # closed already
            socket.transport.abort()

    async def _call_tool(self, call: ToolCall) -> Content:
        if call.error:
            return f"{ERROR}{call.error}"
        if self.environment.mcp:
            return await self._step({"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)})
        if call.name != STEP:
            return f"{ERROR}there is no tool '{call.name}', only '{STEP}'"
        return await self._step(call.arguments)

    async def _step(self, action: Mapping[str, Any]) -> Content:
        """Return what the policy reads after an action: the observation, or why the action was rejected."""
        try:
            result = await self._send_action(action)
        except ActionRejected as error:
            return f"{ERROR}{error}"
        self.steps += 1
        if result.get("reward") is not None:
            self.rewards.append(float(result["reward"]))
        self.done = bool(result.get("done"))
        return self._content_of_result(result)

    def _content_of_result(self, result: Mapping[str, Any]) -> Content:
        """Return an observation as the policy reads it: its text, and its image where a field of it is one."""
        observation = dict(result.get("observation") or {})
        picture = self.environment.image
        value = observation.pop(picture, None) if picture is not None else None
        images = [] if value is None else [image_part(value, str(picture))]
        if (name := self.environment.observation) in observation:
            return with_images(as_text(observation[name]), images)
        if self.environment.mcp and "tool_name" in observation:
            return _tool_content(observation)
        shown = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
        shown = shown or observation.get("metadata") or {}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return with_images(text, images)
        return with_images(as_text(shown) if shown else "", images)

    async def _begin_episode(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode; wait while the server is away or full."""
        clock, attempt = asyncio.get_running_loop().time, 0
        stop = clock() + self.environment.wait
        while True:
            try:
                self.socket = await connect(
                    self.environment.socket,
                    open_timeout=self.environment.timeout,
                    max_size=None,
                    ping_interval=None,  # a busy environment may not answer pings; each message has a timeout
                    proxy=None if self.environment.local else True,
                )
                return await self._request("reset", arguments)
            except (OSError, ConnectionClosed, InvalidHandshake, _ServerFull) as error:
                await self.close()
                if clock() > stop:
                    raise OpenEnvFault(f"no session within {self.environment.wait:g} seconds: {error}") from error
            await asyncio.sleep(_backoff(attempt))
            attempt += 1

    async def _send_action(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """Return observation, reward and done after an action."""
        try:
            return await self._request("step", action)
        except (OSError, ConnectionClosed) as error:
            raise OpenEnvFault(f"the connection was lost: {error}") from error

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(ConnectionClosed):  # a full server sends its error and closes; that is still read
            await self.socket.send(json.dumps({"type": kind, "data": dict(data)}, default=str))
        try:
            async with asyncio.timeout(self.environment.timeout):
                answer = json.loads(await self.socket.recv())
        except TimeoutError:
            raise OpenEnvFault(f"no answer to '{kind}' within {self.environment.timeout:g} seconds") from None
        except (ValueError, RecursionError) as error:
            raise OpenEnvFault(f"the answer to '{kind}' is no JSON: {error}") from error
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise OpenEnvFault(f"the answer to '{kind}' is no OpenEnv message")
        if answer["type"] == "error":
            raise _fault_of(content)
        return content


def _tool_content(observation: Mapping[str, Any]) -> Content:
    if error := observation.get("error"):
        kind, message = error.get("error_type"), error.get("message")
        if kind not in MODEL_ERRORS:
            raise OpenEnvFault(f"{observation['tool_name']}: {kind}: {message}")
        return f"{ERROR}{message}"
    result = observation.get("result")
    content = block_content(result.get("content")) if isinstance(result, Mapping) else None
    return as_text(result) if content is None else content


def _tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def _fault_of(content: Mapping[str, Any]) -> Exception:
    code, message = content.get("code"), str(content.get("message", ""))
    if code == "VALIDATION_ERROR":
        faults = [(".".join(map(str, fault.get("loc", ()))), fault.get("msg")) for fault in content.get("errors") or ()]
        return ActionRejected("; ".join(f"{field}: {problem}" for field, problem in faults) or message)
    if code == "CAPACITY_REACHED":
        remedy = "raise max_concurrent_envs in its create_app (the class needs SUPPORTS_CONCURRENT_SESSIONS = True)"
        most = content.get("max_sessions", "few")
        warn_once(f"the OpenEnv server has room for {most} sessions only, and others wait: {remedy}")
        return _ServerFull(message)
    return OpenEnvFault(f"{code}: {message}")


def _backoff(attempt: int) -> float:
    return min(MIN_BACKOFF * 2 ** min(attempt, 10), MAX_BACKOFF) * random.uniform(0.5, 1.0)
