"""A user's tools and environment class: functions to call, and an object for each episode that keeps its state."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from upweight.environments.episode import Message, Opening, Outcome, Reply, ToolCall, Turn, opening_messages
from upweight.environments.tools import Schema, answered, methods_of, schema_of, tool_message, unique_tools
from upweight.environments.user_calls import TooSlow, UserCalls
from upweight.errors import UserError

REWARD = "reward"
TOOLS = "tools"  # the key that names functions
Factory = Callable[[], Any]


@dataclass
class PythonEnvironment:
    """Episodes of a user's code; without a class, the tools alone.

    `factory` makes the object of an episode, or is such a function by the value of the row's `environment`.
    """

    factory: Factory | Mapping[str, Factory] | None = None
    functions: Sequence[Callable[..., Any]] = ()
    timeout: float = 60.0  # seconds of one call of the object
    tool_timeout: float = 30.0
    key: str = "environment.class"
    calls: UserCalls = field(default_factory=UserCalls)

    def __post_init__(self) -> None:
        self._methods: dict[type, dict[str, Schema]] = {}
        self.tools = unique_tools(self.functions, TOOLS)
        self.schemas = {name: schema_of(function, TOOLS) for name, function in self.tools.items()}
        factories = self.factory.values() if isinstance(self.factory, Mapping) else [self.factory]
        self.kinds = [_kind(factory) for factory in factories if factory is not None]
        for kind in self.kinds:
            self._check(kind)

    def methods_of(self, kind: type) -> dict[str, Schema]:
        """Tools of a class, read once."""
        if kind not in self._methods:
            self._methods[kind] = methods_of(kind, self.key)
        return self._methods[kind]

    @property
    def reward_names(self) -> Sequence[str]:
        """What the classes list in `reward_names`, else one name where they have `get_reward`."""
        rewarded = [kind for kind in self.kinds if hasattr(kind, "get_reward")]
        return list(dict.fromkeys(str(name) for kind in rewarded for name in getattr(kind, "reward_names", (REWARD,))))

    def episode(self) -> "PythonEpisode":
        """A new one, not yet open."""
        return PythonEpisode(self)

    async def start(self) -> None:
        """Nothing: the user's code is here."""

    async def stop(self) -> None:
        """End the loop that async functions ran on."""
        self.calls.close()

    def factory_for(self, row: Mapping[str, Any]) -> Factory | None:
        """What makes the object for a row."""
        if not isinstance(self.factory, Mapping):
            return self.factory
        name = str(row.get("environment"))
        if name not in self.factory:
            known = ", ".join(map(str, self.factory))
            raise UserError(f"column 'environment': there is no environment {name!r}; known: {known}.")
        return self.factory[name]

    def _check(self, kind: type) -> None:
        """Refuse a class that cannot be an environment."""
        if not callable(getattr(kind, "reset", None)):
            raise UserError(f"{self.key}: {kind.__name__} has no method 'reset(self, **row)'.")
        both = set(self.methods_of(kind)) & set(self.tools)
        if both:
            raise UserError(f"{TOOLS}: '{both.pop()}' is also a method of {kind.__name__}. Rename one.")
        if not self.methods_of(kind) and not self.tools and not hasattr(kind, "step"):
            raise UserError(
                f"{self.key}: {kind.__name__} has nothing that answers: give it public methods with docstrings (tools) "
                "or a method 'step(self, text)'."
            )


class PythonEpisode:
    """One object's life: reset, calls and steps, its reward."""

    def __init__(self, environment: PythonEnvironment) -> None:
        self._of = environment
        self._object: Any = None
        self._tools = dict(environment.tools)

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """The row's prompt, and what `reset` says: text joins the user's last message, messages follow."""
        messages = opening_messages(row.get("prompt"))
        schemas = dict(self._of.schemas)
        factory = self._of.factory_for(row)
        if factory is not None:
            self._object = await self._run(factory)
            methods = self._of.methods_of(type(self._object))
            self._tools |= {name: getattr(self._object, name) for name in methods}
            schemas |= methods
            said = await self._run(self._object.reset, **_taken(self._object.reset, row))
            if isinstance(said, str):
                messages = opening_messages(messages, said)
            elif said is not None:
                messages += _messages(said)
        return Opening(messages, list(schemas.values()))

    async def reply(self, turn: Turn) -> Reply:
        """Results of the turn's calls, in their order; a turn without calls goes to `step`, or ends the episode."""
        if turn.calls:
            if self._object is None:
                answers = await asyncio.gather(*map(self._answer, turn.calls))
            else:
                answers = [await self._answer(call) for call in turn.calls]  # its state changes with each
            over = getattr(self._object, "done", False) is True
            return Reply([] if over else [message for message, _ in answers], sum(not well for _, well in answers))
        step = getattr(self._object, "step", None)
        if step is None:
            return Reply()
        return _stepped(await self._run(step, turn.text))

    async def outcome(self) -> Outcome:
        """What `get_reward` says: a number, or several by name."""
        get_reward = getattr(self._object, "get_reward", None)
        if get_reward is None:
            return Outcome()
        found = await self._run(get_reward)
        if found is None:
            return Outcome()
        rewards = found if isinstance(found, Mapping) else {REWARD: found}
        known = self._of.reward_names
        stray = [name for name in rewards if name not in known]
        if stray:
            raise UserError(
                f"{self._of.key}: get_reward() returned '{stray[0]}', which is not in the class's `reward_names` "
                f"({', '.join(known)}): list every name there."
            )
        return Outcome({str(name): float(value) for name, value in rewards.items() if value is not None})

    async def close(self) -> None:
        """The object's own `close`, where it has one."""
        if callable(getattr(self._object, "close", None)):
            await self._run(self._object.close)

    async def _answer(self, call: ToolCall) -> tuple[Message, bool]:
        try:
            return await answered(call, self._tools, self._of.calls, self._of.tool_timeout)
        except TooSlow as error:
            if call.name not in self._of.tools:
                raise  # the object is still at work: nobody knows its state
            return tool_message(call, f"error: {error}"), False

    async def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await self._of.calls(function, *arguments, limit=self._of.timeout, **named)


def _kind(factory: Factory) -> type:
    """The class of what a factory makes."""
    return factory if inspect.isclass(factory) else type(factory())


def _taken(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that `reset` takes."""
    parameters = inspect.signature(reset).parameters.values()
    columns = {name: value for name, value in row.items() if name != "prompt_ids"}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}


def _stepped(said: Any) -> Reply:
    """What `step` returned: an observation, or (observation, done); None ends the episode."""
    done = False
    if isinstance(said, tuple) and len(said) == 2:
        said, done = said
    if done or said is None:
        return Reply()
    return Reply([{"role": "user", "content": said}] if isinstance(said, str) else _messages(said))


def _messages(said: Any) -> list[dict[str, Any]]:
    if isinstance(said, Mapping):
        said = [said]
    if not isinstance(said, list | tuple) or not all(isinstance(one, Mapping) and "role" in one for one in said):
        raise UserError(f"an environment must say text or messages, got {said!r:.80}")
    return [dict(one) for one in said]
