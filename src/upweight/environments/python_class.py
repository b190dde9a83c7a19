"""A user's tools and environment class: functions to call, and one object for each episode."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upweight.environments.episode import EpisodeOutcome, Message, Opening, Reply, ToolCall, Turn, opening_messages
from upweight.environments.tools import (
    Schema,
    methods_of,
    run_tool,
    schema_of,
    tool_message,
    undescribed_methods,
    unique_tools,
)
from upweight.environments.user_calls import CallTimeout, UserCalls
from upweight.errors import UserError

REWARD = "reward"
TOOLS = "tools"  # the config key of the functions
Factory = Callable[[], Any]


@dataclass
class PythonEnvironment:
    """Episodes of a user's class with the tools, or of the tools alone.

    `factory` makes the object of an episode; as a mapping, it has such a function for each `environment` of the rows.
    """

    factory: Factory | Mapping[str, Factory] | None = None
    functions: Sequence[Callable[..., Any]] = ()
    timeout: float = 60.0  # seconds for one call of the object
    tool_timeout: float = 30.0
    key: str = "environment.class"
    calls: UserCalls = field(default_factory=UserCalls)

    def __post_init__(self) -> None:
        self._methods: dict[type, dict[str, Schema]] = {}
        self.tools = unique_tools(self.functions, TOOLS)
        self.schemas = {name: schema_of(function, TOOLS) for name, function in self.tools.items()}
        factories = self.factory.values() if isinstance(self.factory, Mapping) else [self.factory]
        self.classes = [_class_of(factory) for factory in factories if factory is not None]
        for cls in self.classes:
            self._check(cls)

    def methods_of(self, cls: type) -> dict[str, Schema]:
        """Return the tools of a class, which are read once."""
        if cls not in self._methods:
            self._methods[cls] = methods_of(cls, self.key)
        return self._methods[cls]

    @property
    def reward_names(self) -> Sequence[str]:
        """The `reward_names` of the classes, or one name for a class that only has `get_reward`."""
        rewarded = [cls for cls in self.classes if hasattr(cls, "get_reward")]
        return list(dict.fromkeys(str(name) for cls in rewarded for name in getattr(cls, "reward_names", (REWARD,))))

    def episode(self) -> "PythonEpisode":
        """Return a new episode that is not yet open."""
        return PythonEpisode(self)

    async def start(self) -> None:
        """Do nothing, since the user's code runs in this process."""

    async def stop(self) -> None:
        """Stop the loop of async functions."""
        self.calls.close()

    def factory_for(self, row: Mapping[str, Any]) -> Factory | None:
        """Return the factory for a row."""
        if not isinstance(self.factory, Mapping):
            return self.factory
        name = str(row.get("environment"))
        if name not in self.factory:
            known = ", ".join(map(str, self.factory))
            raise UserError(f"column 'environment': there is no environment {name!r}; known: {known}.")
        return self.factory[name]

    def _check(self, cls: type) -> None:
        """Refuse a class that cannot be an environment."""
        if not callable(getattr(cls, "reset", None)):
            raise UserError(f"{self.key}: {cls.__name__} has no method 'reset(self, **row)'.")
        both = set(self.methods_of(cls)) & set(self.tools)
        if both:
            raise UserError(f"{TOOLS}: '{both.pop()}' is also a method of {cls.__name__}. Rename one.")
        if not self.methods_of(cls) and not hasattr(cls, "step") and (undescribed := undescribed_methods(cls)):
            raise UserError(
                f"{self.key}: {cls.__name__} cannot reply to the policy: give '{undescribed[0]}' a docstring, which "
                "makes it a tool, or the class a method 'step(self, text)'."
            )


class PythonEpisode:
    """One episode with one object: its reset, tool calls, steps and reward."""

    def __init__(self, environment: PythonEnvironment) -> None:
        self._environment = environment
        self._object: Any = None
        self._tools = dict(environment.tools)

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Return the row's prompt with what `reset` returns: text joins the last user message, messages follow."""
        messages = opening_messages(row.get("prompt"))
        schemas = dict(self._environment.schemas)
        factory = self._environment.factory_for(row)
        if factory is not None:
            self._object = await self._run(factory)
            methods = self._environment.methods_of(type(self._object))
            self._tools |= {name: getattr(self._object, name) for name in methods}
            schemas |= methods
            chosen_by = ("environment",) if isinstance(self._environment.factory, Mapping) else ()
            columns = {name: value for name, value in row.items() if name not in ("prompt_ids", *chosen_by)}
            observation = await self._run(self._object.reset, **_accepted(self._object.reset, columns))
            if isinstance(observation, str):
                messages = opening_messages(messages, observation)
            elif observation is not None:
                messages += _messages(observation)
        return Opening(messages, list(schemas.values()))

    async def reply(self, turn: Turn) -> Reply:
        """Return the results of the turn's calls in order; a turn without calls goes to `step`, or ends the episode."""
        if turn.calls:
            if self._object is None:
                results = await asyncio.gather(*map(self._run_tool, turn.calls))
            else:
                results = [await self._run_tool(call) for call in turn.calls]  # its state changes with each
            done = getattr(self._object, "done", False) is True
            failed = sum(not succeeded for _, succeeded in results)
            return Reply([] if done else [message for message, _ in results], failed)
        step = getattr(self._object, "step", None)
        if step is None:
            return Reply()
        return _step_reply(await self._run(step, turn.text))

    async def outcome(self) -> EpisodeOutcome:
        """Return the result of `get_reward`: a number, or several by name."""
        get_reward = getattr(self._object, "get_reward", None)
        returned = None if get_reward is None else await self._run(get_reward)
        if returned is None:
            return EpisodeOutcome(environment=self._object)
        rewards = returned if isinstance(returned, Mapping) else {REWARD: returned}
        known = self._environment.reward_names
        unknown = [name for name in rewards if name not in known]
        if unknown:
            raise UserError(
                f"{self._environment.key}: get_reward() returned '{unknown[0]}', which is not in the class's "
                f"`reward_names` ({', '.join(known)}): list every name there."
            )
        values = {str(name): float(value) for name, value in rewards.items() if value is not None}
        return EpisodeOutcome(values, environment=self._object)

    async def close(self) -> None:
        """Call the object's `close`, where it has one."""
        if callable(getattr(self._object, "close", None)):
            await self._run(self._object.close)

    async def _run_tool(self, call: ToolCall) -> tuple[Message, bool]:
        try:
            return await run_tool(call, self._tools, self._environment.calls, self._environment.tool_timeout)
        except CallTimeout as error:
            if call.name not in self._environment.tools:
                raise  # the call still runs, so the state of the object is not known
            return tool_message(call, f"error: {error}"), False

    async def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await self._environment.calls(function, *arguments, limit=self._environment.timeout, **named)


def _class_of(factory: Factory) -> type:
    """Return the class of the objects that a factory makes."""
    return factory if inspect.isclass(factory) else type(factory())


def _accepted(reset: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that `reset` accepts."""
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}


def _step_reply(observation: Any) -> Reply:
    """Convert what `step` returned: an observation, or (observation, done); None ends the episode."""
    done = False
    if isinstance(observation, tuple) and len(observation) == 2:
        observation, done = observation
    if done or observation is None:
        return Reply()
    is_text = isinstance(observation, str)
    return Reply([{"role": "user", "content": observation}] if is_text else _messages(observation))


def _messages(observation: Any) -> list[dict[str, Any]]:
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise UserError(f"an environment must return text or messages, got {observation!r:.80}")
    return [dict(message) for message in messages]
