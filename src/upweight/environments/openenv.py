"""Episodes on an OpenEnv server, with typed actions or MCP tools and a reward for each step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from upweight.data.raw_row import PREPARED_COLUMNS
from upweight.environments.episode import EpisodeOutcome, Message, Opening, Reply, ToolCall, Turn, opening_messages
from upweight.environments.openenv_connection import ActionRejected, OpenEnvConnection, OpenEnvFault, OpenEnvServer
from upweight.environments.tools import tool_message
from upweight.errors import UserError

REWARD = "openenv"
STEP = "step"  # name of the tool that takes a typed action
ERROR = "error: "  # prefix of what the policy did wrong
SCALARS = ("string", "integer", "number", "boolean")
MODEL_ERRORS = ("invalid_args", "tool_not_found", "execution_error")

Reduction = Literal["sum", "last", "mean", "max"]


@dataclass
class OpenEnv:
    """An OpenEnv server; each episode has its own connection."""

    url: str
    reward: Reduction = "sum"  # how the step rewards of an episode are combined
    columns: Sequence[str] | None = None  # of the row, passed to `reset`; None: all but the prompt
    text_field: str | None = None  # field of the action for the policy's text; None: the only one, if any
    observation: str | None = None  # field of the observation that the policy reads; None: all
    timeout: float = 60.0  # seconds for one answer
    wait: float = 300.0  # seconds to wait for the server and for a free session
    actions: "Actions" = field(init=False)

    def __post_init__(self) -> None:
        self.server = OpenEnvServer(self.url, self.timeout, self.wait)

    @property
    def reward_names(self) -> Sequence[str]:
        """The one name of the combined step rewards."""
        return (REWARD,)

    def episode(self) -> "OpenEnvEpisode":
        """Return a new episode that is not yet connected."""
        return OpenEnvEpisode(self, OpenEnvConnection(self.server))

    async def start(self) -> None:
        """Wait for the server and read the schema of its actions."""
        schema = await self.server.schema()
        self.actions = Actions.of(schema["action"], self.text_field)
        known = (schema.get("observation") or {}).get("properties") or {}
        if self.observation is not None and known and self.observation not in known:
            raise UserError(
                f"environment.observation: '{self.observation}' is no field of what {self.url} shows; "
                f"it has {', '.join(known)}"
            )

    async def stop(self) -> None:
        """Leave the server running, since the user started it."""


@dataclass(frozen=True)
class Actions:
    """How a turn becomes an action: by MCP tools, one field of plain text, or a call of `step`."""

    mcp: bool
    text_field: str | None
    tools: Sequence[Mapping[str, Any]]

    @staticmethod
    def of(schema: Mapping[str, Any], text_field: str | None) -> "Actions":
        """Choose the way by the JSON schema of an action."""
        properties = schema.get("properties") or {}
        fields = {name: kind for name, kind in properties.items() if name != "metadata" and "const" not in kind}
        if text_field is not None and text_field not in fields:
            raise UserError(
                f"environment.text_field: the environment's action has no field '{text_field}'; "
                f"it has {', '.join(fields) or 'none'}"
            )
        if not fields or {"tool_name", "arguments"} == set(fields):
            return Actions(True, None, ())
        if text_field is None and len(fields) == 1:
            (name, kind), *_ = fields.items()
            text_field = name if kind.get("type") in SCALARS else None
        parameters = {
            "type": "object",
            "properties": fields,
            "required": [name for name in schema.get("required") or () if name in fields],
        }
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        description = str(schema.get("description") or "Act on the environment.")
        return Actions(False, text_field, () if text_field else (_tool(STEP, description, parameters),))


@dataclass
class OpenEnvEpisode:
    """One episode, over one connection."""

    environment: OpenEnv
    connection: OpenEnvConnection
    rewards: list[float] = field(default_factory=list)  # of the steps that returned one
    steps: int = 0
    done: bool = False

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Reset the environment with the row's columns; the first observation follows the prompt."""
        columns = self.environment.columns
        names = [name for name in row if name not in PREPARED_COLUMNS] if columns is None else columns
        if missing := [name for name in names if name not in row]:
            raise UserError(
                f"environment.columns: the data has no column {', '.join(missing)}; it has {', '.join(row)}"
            )
        arguments = {name: row[name] for name in names if row[name] is not None}
        try:
            result = await self.connection.reset(arguments)
        except ActionRejected as error:
            raise OpenEnvFault(f"reset was refused: {error}") from error
        actions = self.environment.actions
        tools = await self._tools() if actions.mcp else actions.tools
        return Opening(opening_messages(row.get("prompt"), self._text(result)), tools)

    async def reply(self, turn: Turn) -> Reply:
        """Step once with plain text, or once for each call; a turn without a call ends the episode."""
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

    async def outcome(self) -> EpisodeOutcome:
        """Return the combined step rewards."""
        total = {REWARD: _combined(self.rewards, self.environment.reward)}
        return EpisodeOutcome(
            total, details={"step_rewards": list(self.rewards), "steps": self.steps, "done": self.done}
        )

    async def close(self) -> None:
        """Close the connection, which ends the environment."""
        await self.connection.close()

    async def _tools(self) -> list[Mapping[str, Any]]:
        observation = (await self.connection.step({"type": "list_tools"})).get("observation") or {}
        return [
            _tool(tool["name"], tool.get("description") or "", tool.get("input_schema") or {})
            for tool in observation.get("tools") or ()
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
        """Return what the policy reads after an action: the observation, or why the action was rejected."""
        try:
            result = await self.connection.step(action)
        except ActionRejected as error:
            return f"{ERROR}{error}"
        self.steps += 1
        if result.get("reward") is not None:
            self.rewards.append(float(result["reward"]))
        self.done = bool(result.get("done"))
        return self._text(result)

    def _text(self, result: Mapping[str, Any]) -> str:
        observation = result.get("observation") or {}
        field_name = self.environment.observation
        if field_name is not None and field_name in observation:
            return _as_text(observation[field_name])
        if self.environment.actions.mcp and "tool_name" in observation:
            return _tool_text(observation)
        shown = {name: value for name, value in observation.items() if name not in ("metadata", "done", "reward")}
        shown = shown or observation.get("metadata") or {}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return _as_text(shown) if shown else ""


def _tool_text(observation: Mapping[str, Any]) -> str:
    """Return the result of an MCP tool as text."""
    if error := observation.get("error"):
        kind, message = error.get("error_type"), error.get("message")
        if kind not in MODEL_ERRORS:
            raise OpenEnvFault(f"{observation['tool_name']}: {kind}: {message}")
        return f"{ERROR}{message}"
    result = observation.get("result")
    parts = result.get("content") if isinstance(result, Mapping) else None
    texts = [part["text"] for part in parts or () if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else _as_text(result)


def _combined(rewards: Sequence[float], how: Reduction) -> float:
    """Combine step rewards; an episode without any earns 0."""
    if not rewards:
        return 0.0
    if how == "last":
        return rewards[-1]
    return max(rewards) if how == "max" else sum(rewards) / (len(rewards) if how == "mean" else 1)


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
