"""Python functions as tools: their schemas for the policy, and how they are called."""

import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from upweight.environments.episode import Message, ToolCall
from upweight.environments.user_calls import CallTimeout, UserCalls
from upweight.errors import UserError, did_you_mean
from upweight.user_modules import describe_error

Schema = Mapping[str, Any]
NOT_TOOLS = ("reset", "step", "get_reward", "close")  # methods of an environment class that are no tools


def schema_of(function: Callable[..., Any], key: str) -> Schema:
    """Return the JSON schema of a function: its name, description and arguments."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = get_json_schema(function)
    except Exception as error:  # reads the user's hints and docstrings, which may raise anything
        raise UserError(
            f"{key}: '{name}' cannot be described to the model: {error}. Give each argument a type hint and a line "
            "under 'Args:' in the docstring."
        ) from error
    return {
        "type": "function",
        "function": {part: value for part, value in schema["function"].items() if part != "return"},
    }


def methods_of(cls: type, key: str) -> dict[str, Schema]:
    """Return the schemas of the public methods of an environment class that have a docstring."""
    return {
        name: schema_of(types.MethodType(method, object()), f"{key}: {cls.__name__}")
        for name, method in _public_methods(cls)
        if method.__doc__
    }


def undescribed_methods(cls: type) -> list[str]:
    """Return the names of the public methods of an environment class that lack a docstring, and so are no tools."""
    return [name for name, method in _public_methods(cls) if not method.__doc__]


def _public_methods(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    methods = inspect.getmembers(cls, inspect.isfunction)
    return [(name, method) for name, method in methods if not name.startswith("_") and name not in NOT_TOOLS]


def unique_tools(functions: Sequence[Callable[..., Any]], key: str) -> dict[str, Callable[..., Any]]:
    """Return functions by name; two of one name are an error."""
    tools: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if tools.setdefault(name, function) is not function:
            raise UserError(f"{key}: two tools are named '{name}'. Rename one.")
    return tools


async def run_tool(
    call: ToolCall, functions: Mapping[str, Callable[..., Any]], calls: UserCalls, limit: float
) -> tuple[Message, bool]:
    """Run a tool call; return its result as a message, and whether it succeeded. A CallTimeout is raised."""
    problem = call.error or _mismatch(call, functions)
    content = f"error: {problem}"
    if problem is None:
        try:
            result = await calls(functions[call.name], limit=limit, **call.arguments)
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except CallTimeout:
            raise
        except (Exception, SystemExit) as error:  # the user's code: the policy reads the error
            problem, content = str(error), f"error: {describe_error(error)}"
    return tool_message(call, content), problem is None


def tool_message(call: ToolCall, content: str) -> Message:
    """Return the message with the result of a call."""
    call_id = {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", "name": call.name, "content": content, **call_id}


def _mismatch(call: ToolCall, functions: Mapping[str, Callable[..., Any]]) -> str | None:
    """Return why a call does not fit the functions, for the policy to read; None where it does."""
    function = functions.get(call.name)
    if function is None:
        return f"there is no tool '{call.name}'.{did_you_mean(call.name, functions)} Tools: {', '.join(functions)}"
    try:
        inspect.signature(function).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"
    return None
