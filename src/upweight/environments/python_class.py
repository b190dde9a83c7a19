"""A user's tools and environment class: functions to call, and one object for each episode."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from upweight.environments.episode import Environment, Episode, EpisodeOutcome, Message, Opening, Reply, ToolCall, Turn
from upweight.environments.tools import (
    as_content,
    image_parts,
    methods_of,
    opening_messages,
    public_methods,
    schema_of,
    tool_message,
)
from upweight.errors import UserError, did_you_mean
from upweight.event_loop import EventLoop
from upweight.user_modules import describe_error

REWARD = "reward"
TOOLS = "tools"  # the config key of the functions
Factory = Callable[[], Any]


class CallTimeout(Exception):
    """A call did not return within its time limit."""


class UserCalls:
    """Runs the user's code within time limits, off the loop of episodes, so that a call that hangs blocks no other."""

    def __init__(self) -> None:
        self._loop = EventLoop("tools")
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)

    async def __call__(self, function: Callable[..., Any], *arguments: Any, limit: float, **named: Any) -> Any:
        """Return what a function returns; raise what it raises, or CallTimeout."""
        call = partial(function, *arguments, **named)
        done: Future[Any] = Future()
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            done = self._loop.start(_await_call(call))
        else:
            self._jobs.put(partial(_settle_future, call, done))
            if not self._free.acquire(blocking=False):
                # A daemon: threads cannot be ended, and one that hangs must not keep the program from ending.
                threading.Thread(target=self._work, name="environments", daemon=True).start()
        result = asyncio.wrap_future(done)
        try:
            await asyncio.wait({result}, timeout=limit)
            if not result.done():
                raise CallTimeout(f"it took longer than {limit:g} seconds")
            return result.result()
        finally:
            result.cancel()  # else a late result would be passed to a loop that may be closed by then

    def _work(self) -> None:
        # Forever: a program started with PR_SET_PDEATHSIG (`bwrap --die-with-parent`) dies with the thread.
        while True:
            self._jobs.get()()
            self._free.release()

    def close(self) -> None:
        """Stop the loop and drop the calls that run on it."""
        self._loop.close()


def _settle_future(call: Callable[[], Any], done: "Future[Any]") -> None:
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(call())
        except BaseException as error:  # the user's code: raised in the caller
            passes = not isinstance(error, StopIteration | SystemExit | KeyboardInterrupt)
            done.set_exception(error if passes else _for_asyncio(error))


async def _await_call(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:
        raise _for_asyncio(error) from error


def _for_asyncio(error: BaseException) -> RuntimeError:
    """Convert an exception that asyncio would not pass on, or would end its loop with."""
    message = type(error).__name__
    if isinstance(error, SystemExit):
        message = f"the code called sys.exit({'' if error.code is None else repr(error.code)})"
    return RuntimeError(message).with_traceback(error.__traceback__)


@dataclass
class PythonEnvironment(Environment):
    """Episodes of a user's class with the tools, or of the tools alone."""

    factory: Factory | Mapping[str, Factory] | None = None  # of one object; or by a row's `environment`
    functions: Sequence[Callable[..., Any]] = ()
    timeout: float = 60.0  # seconds for one call of the object
    tool_timeout: float = 30.0
    key: str = "environment.class"
    calls: UserCalls = field(default_factory=UserCalls)

    def __post_init__(self) -> None:
        self.tools: dict[str, Callable[..., Any]] = {}
        for function in self.functions:
            name = getattr(function, "__name__", type(function).__name__)
            if self.tools.setdefault(name, function) is not function:
                raise UserError(f"{TOOLS}: two tools are named '{name}'. Rename one.")
        self.schemas = {name: schema_of(function, TOOLS) for name, function in self.tools.items()}
        factories = self.factory.values() if isinstance(self.factory, Mapping) else [self.factory]
        made = [factory for factory in factories if factory is not None]
        self.classes = [factory if inspect.isclass(factory) else type(factory()) for factory in made]
        for cls in self.classes:
            self._check_class(cls)

    @property
    def reward_names(self) -> Sequence[str]:
        """The `reward_names` of the classes, or one name for a class that only has `get_reward`."""
        rewarded = [cls for cls in self.classes if hasattr(cls, "get_reward")]
        return list(dict.fromkeys(str(name) for cls in rewarded for name in getattr(cls, "reward_names", (REWARD,))))

    def episode(self) -> "PythonEpisode":
        return PythonEpisode(self)

    async def stop(self) -> None:
        self.calls.close()

    def factory_for(self, row: Mapping[str, Any]) -> Factory | None:
        if not isinstance(self.factory, Mapping):
            return self.factory
        name, known = row.get("environment"), ", ".join(map(str, self.factory))
        if name is None:
            raise UserError(f"{self.key}: a row has no column 'environment', which chooses among: {known}.")
        if str(name) not in self.factory:
            raise UserError(f"column 'environment': there is no environment {name!r}; known: {known}.")
        return self.factory[str(name)]

    def _check_class(self, cls: type) -> None:
        if not callable(getattr(cls, "reset", None)):
            raise UserError(f"{self.key}: {cls.__name__} has no method 'reset(self, **row)'.")
        methods = methods_of(cls, self.key)
        if both := set(methods) & set(self.tools):
            raise UserError(f"{TOOLS}: '{both.pop()}' is also a method of {cls.__name__}. Rename one.")
        if not methods and not hasattr(cls, "step") and (unknown := list(public_methods(cls))):
            remedy = f"give '{unknown[0]}' a docstring, which makes it a tool, or the class a method 'step(self, text)'"
            raise UserError(f"{self.key}: {cls.__name__} cannot reply to the policy: {remedy}.")


class PythonEpisode(Episode):
    """One episode with one object: its reset, tool calls, steps and reward."""

    def __init__(self, environment: PythonEnvironment) -> None:
        self._environment, self._tools = environment, dict(environment.tools)
        self._object: Any = None

    async def open(self, row: Mapping[str, Any]) -> Opening:
        """Return the row's prompt with what `reset` returns: text joins the last user message, messages follow."""
        messages, schemas = opening_messages(row.get("prompt")), dict(self._environment.schemas)
        factory = self._environment.factory_for(row)
        if factory is not None:
            self._object = await self._run_method(factory)
            methods = methods_of(type(self._object), self._environment.key)
            self._tools |= {name: getattr(self._object, name) for name in methods}
            schemas |= methods
            chosen_by = ("environment",) if isinstance(self._environment.factory, Mapping) else ()
            columns = {name: value for name, value in row.items() if name not in ("prompt_ids", *chosen_by)}
            observation = await self._run_method(self._object.reset, **_accepted_columns(self._object.reset, columns))
            if isinstance(observation, str) or image_parts(observation):
                messages = opening_messages(messages, image_parts(observation) or observation)
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
        return Reply() if step is None else _step_reply(await self._run_method(step, turn.text))

    async def outcome(self) -> EpisodeOutcome:
        """Return the result of `get_reward`: a number, or several by name."""
        get_reward = getattr(self._object, "get_reward", None)
        returned = None if get_reward is None else await self._run_method(get_reward)
        if returned is None:
            return EpisodeOutcome(environment=self._object)
        rewards = returned if isinstance(returned, Mapping) else {REWARD: returned}
        known = self._environment.reward_names
        if unknown := [name for name in rewards if name not in known]:
            problem = f"get_reward() returned '{unknown[0]}', which is not in the class's `reward_names`"
            raise UserError(f"{self._environment.key}: {problem} ({', '.join(known)}): list every name there.")
        values = {str(name): float(value) for name, value in rewards.items() if value is not None}
        return EpisodeOutcome(values, environment=self._object)

    async def close(self) -> None:
        if callable(getattr(self._object, "close", None)):
            await self._run_method(self._object.close)

    async def _run_tool(self, call: ToolCall) -> tuple[Message, bool]:
        """Run a tool call; return its result as a message, and whether it succeeded."""
        environment, problem = self._environment, call.error or _call_mismatch(call, self._tools)
        content: str | list[dict[str, Any]] = f"error: {problem}"
        if problem is None:
            try:
                function, limit = self._tools[call.name], environment.tool_timeout
                content = as_content(await environment.calls(function, limit=limit, **call.arguments))
            except CallTimeout as error:
                if call.name not in environment.tools:
                    raise  # the call still runs, so the state of the object is not known
                problem, content = str(error), f"error: {error}"
            except (Exception, SystemExit) as error:  # the user's code: the policy reads the error
                problem, content = str(error), f"error: {describe_error(error)}"
        return tool_message(call, content), problem is None

    async def _run_method(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await self._environment.calls(function, *arguments, limit=self._environment.timeout, **named)


def _accepted_columns(reset: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}


def _step_reply(observation: Any) -> Reply:
    """Convert what `step` returned: an observation, or (observation, done); None ends the episode."""
    is_pair = isinstance(observation, tuple) and len(observation) == 2
    observation, done = observation if is_pair else (observation, False)
    if done or observation is None:
        return Reply()
    content = observation if isinstance(observation, str) else image_parts(observation)
    return Reply(_messages(observation if content is None else {"role": "user", "content": content}))


def _messages(observation: Any) -> list[dict[str, Any]]:
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise UserError(f"an environment must return text or messages, got {observation!r:.80}")
    return [dict(message) for message in messages]


def _call_mismatch(call: ToolCall, functions: Mapping[str, Callable[..., Any]]) -> str | None:
    """Return why a call does not fit the functions, for the policy to read; None where it does."""
    function = functions.get(call.name)
    if function is None:
        return f"there is no tool '{call.name}'.{did_you_mean(call.name, functions)} Tools: {', '.join(functions)}"
    try:
        inspect.signature(function).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"
    return None
