"""Episodes on an OpenEnv server: typed actions or MCP tools, a reward for each step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from upweight.data.raw_row import OWN_COLUMNS
from upweight.environments.episode import Message, Opening, Outcome, Reply, ToolCall, Turn, opening_messages
from upweight.environments.openenv_connection import Broken, Invalid, OpenEnvConnection, Server
from upweight.environments.tools import tool_message
from upweight.errors import UserError

REWARD = "openenv"
STEP = "step"  # the tool that a typed action is offered as
ERROR = "error: "  # before what the policy did wrong
PLAIN = ("string", "integer", "number", "boolean")
MODEL_ERRORS = ("invalid_args", "tool_not_found", "execution_error")

Total = Literal["sum", "last", "mean", "max"]


@dataclass
class OpenEnv:
    """A server of environments, one connection for each episode."""

    url: str
    reward: Total = "sum"  # of the rewards of an episode's steps
    columns: Sequence[str] | None = None  # of the row, handed to `reset`; None: all but the prompt
    text_field: str | None = None  # of the action, filled by what the policy writes; None: the only one, if there is
    observation: str | None = None  # field that the policy reads; None: all of them
    timeout: float = 60.0  # seconds for one answer
    wait: float = 300.0  # seconds for the server to be there and to have a free session
    actions: "Actions" = field(init=False)

    def __post_init__(self) -> None:
        self.server = Server(self.url, self.timeout, self.wait)

    @property
    def reward_names(self) -> Sequence[str]:
        """One: the steps' rewards together."""
        return (REWARD,)

    def episode(self) -> "OpenEnvEpisode":
        """A new one, not yet connected."""
        return OpenEnvEpisode(self, OpenEnvConnection(self.server))

    async def start(self) -> None:
        """Wait for the server and learn what it takes."""
        schema = await self.server.schema()
        self.actions = Actions.of(schema["action"], self.text_field)
        known = (schema.get("observation") or {}).get("properties") or {}
        if self.observation is not None and known and self.observation not in known:
            raise UserError(
                f"environment.observation: '{self.observation}' is no field of what {self.url} shows; "
                f"it has {', '.join(known)}"
            )

    async def stop(self) -> None:
        """The server is the user's own; it stays."""


@dataclass(frozen=True)
class Actions:
    """How what the policy writes becomes an action: MCP tools, one field of plain text, or a call of `step`."""

    mcp: bool
    text_field: str | None
    tools: Sequence[Mapping[str, Any]]

    @staticmethod
    def of(schema: Mapping[str, Any], text_field: str | None) -> "Actions":
        """Read off an action's JSON schema."""
        named = schema.get("properties") or {}
        fields = {name: kind for name, kind in named.items() if name != "metadata" and "const" not in kind}
        if text_field is not None and text_field not in fields:
            raise UserError(
                f"environment.text_field: the environment's action has no field '{text_field}'; "
                f"it has {', '.join(fields) or 'none'}"
            )
        if not fields or {"tool_name", "arguments"} == set(fields):
            return Actions(True, None, ())
        if text_field is None and len(fields) == 1:
            (name, kind), *_ = fields.items()
            text_field = name if kind.get("type") in PLAIN else None
        parameters = {
            "type": "object",
            "properties": fields,
            "required": [name for name in schema.get("required") or () if name in fields],
        }
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        about = str(schema.get("description") or "Act on the environment.")
        return Actions(False, text_field, () if text_field else (_tool(STEP, about, parameters),))


@dataclass
class OpenEnvEpisode:
    """One episode over its own connection."""

    environment: OpenEnv
    link: OpenEnvConnection
    rewards: list[float] = field(default_factory=list)  # of the steps that gave one
    steps: int = 0
    done: bool = False

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Reset with the row's columns; the first observation follows the prompt."""
        wanted = self.environment.columns
        names = [name for name in row if name not in OWN_COLUMNS] if wanted is None else wanted
        if missing := [name for name in names if name not in row]:
            raise UserError(
                f"environment.columns: the data has no column {', '.join(missing)}; it has {', '.join(row)}"
            )
        arguments = {name: row[name] for name in names if row[name] is not None}
        try:
            found = await self.link.reset(arguments)
        except Invalid as error:
            raise Broken(f"reset was refused: {error}") from error
        actions = self.environment.actions
        tools = await self._tools() if actions.mcp else actions.tools
        return Opening(opening_messages(row.get("prompt"), self._text(found)), tools)

    async def reply(self, turn: Turn) -> Reply:
        """Step once with plain text, or once for each call; without a call the policy has had enough."""
        name = self.environment.actions.text_field
        if name is not None:
            text = await self._step({name: turn.text.strip()})
            return Reply() if self.done else Reply([{"role": "user", "content": text}])
        messages: list[Message] = []
        for call in turn.calls:
            messages.append(tool_message(call, await self._call(call)))
            if self.done:
                break
        failed = sum(str(message["content"]).startswith(ERROR) for message in messages)
        return Reply([] if self.done else messages, failed)

    async def outcome(self) -> Outcome:
        """The steps' rewards, put together as the user says."""
        total = {REWARD: _total(self.rewards, self.environment.reward)}
        return Outcome(total, details={"step_rewards": list(self.rewards), "steps": self.steps, "done": self.done})

    async def close(self) -> None:
        """End the connection, and with it the environment."""
        await self.link.close()

    async def _tools(self) -> list[Mapping[str, Any]]:
        found = (await self.link.step({"type": "list_tools"})).get("observation") or {}
        return [
            _tool(one["name"], one.get("description") or "", one.get("input_schema") or {})
            for one in found.get("tools") or ()
        ]

    async def _call(self, call: ToolCall) -> str:
        arguments = dict(call.arguments)
        if call.error:
            return f"{ERROR}{call.error}"
        if self.environment.actions.mcp:
            return await self._step({"type": "call_tool", "tool_name": call.name, "arguments": arguments})
        if call.name != STEP:
            return f"{ERROR}there is no tool '{call.name}', only '{STEP}'"
        return await self._step(arguments)

    async def _step(self, action: Mapping[str, Any]) -> str:
        """What the policy reads after an action; what it did wrong is told, what the environment did wrong raises."""
        try:
            found = await self.link.step(action)
        except Invalid as error:
            return f"{ERROR}{error}"
        self.steps += 1
        if found.get("reward") is not None:
            self.rewards.append(float(found["reward"]))
        self.done = bool(found.get("done"))
        return self._text(found)

    def _text(self, found: Mapping[str, Any]) -> str:
        observation = found.get("observation") or {}
        named = self.environment.observation
        if named is not None and named in observation:
            return _written(observation[named])
        if self.environment.actions.mcp and "tool_name" in observation:
            return _tool_text(observation)
        shown = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
        shown = shown or observation.get("metadata") or {}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return _written(shown) if shown else ""


def _tool_text(observation: Mapping[str, Any]) -> str:
    """What an MCP tool answered."""
    if error := observation.get("error"):
        kind, message = error.get("error_type"), error.get("message")
        if kind not in MODEL_ERRORS:
            raise Broken(f"{observation['tool_name']}: {kind}: {message}")
        return f"{ERROR}{message}"
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, Mapping) else None
    texts = [part["text"] for part in parts or () if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else _written(result)


def _total(rewards: Sequence[float], how: Total) -> float:
    """A step without a reward does not count; an episode without any earns 0."""
    if not rewards:
        return 0.0
    if how == "last":
        return rewards[-1]
    return max(rewards) if how == "max" else sum(rewards) / (len(rewards) if how == "mean" else 1)


def _tool(name: str, about: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "description": about, "parameters": dict(parameters)}}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
