"""Python functions as tools: their schema for the policy, and their calls."""

import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from upweight.environments.episode import Message, ToolCall
from upweight.environments.user_calls import TooSlow, UserCalls
from upweight.errors import UserError, did_you_mean
from upweight.user_modules import described

Schema = Mapping[str, Any]
NOT_TOOLS = ("reset", "step", "get_reward", "close")  # what an environment class has beside its tools


def schema_of(function: Callable[..., Any], key: str) -> Schema:
    """What the policy is told of a function: its name, what it does, its arguments."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = get_json_schema(function)
    except Exception as error:  # reads foreign hints and docstrings, and raises what it likes
        raise UserError(
            f"{key}: '{name}' cannot be described to the model: {error}. Give each argument a type hint and a line "
            "under 'Args:' in the docstring."
        ) from error
    told = {part: value for part, value in schema["function"].items() if part != "return"}
    return {"type": "function", "function": told}


def methods_of(kind: type, key: str) -> dict[str, Schema]:
    """The public methods of an environment class that have a docstring, as tools."""
    found: dict[str, Schema] = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in NOT_TOOLS and method.__doc__:
            found[name] = schema_of(types.MethodType(method, object()), f"{key}: {kind.__name__}")
    return found


def unique_tools(functions: Sequence[Callable[..., Any]], key: str) -> dict[str, Callable[..., Any]]:
    """Functions by name."""
    found: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        if found.setdefault(name, function) is not function:
            raise UserError(f"{key}: two tools are named '{name}'. Rename one.")
    return found


async def answered(
    call: ToolCall, functions: Mapping[str, Callable[..., Any]], calls: UserCalls, limit: float
) -> tuple[Message, bool]:
    """What a call gives as a message for the policy, and whether it went well; TooSlow is raised."""
    failed = call.error or _mismatch(call, functions)
    content = f"error: {failed}"
    if failed is None:
        try:
            result = await calls(functions[call.name], limit=limit, **call.arguments)
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except TooSlow:
            raise
        except (Exception, SystemExit) as error:  # foreign code: the policy is told
            failed, content = str(error), f"error: {described(error)}"
    return tool_message(call, content), failed is None


def tool_message(call: ToolCall, content: str) -> Message:
    """A tool's answer."""
    known = {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", "name": call.name, "content": content, **known}


def _mismatch(call: ToolCall, functions: Mapping[str, Callable[..., Any]]) -> str | None:
    """Why a call cannot be made, in words for the policy."""
    function = functions.get(call.name)
    if function is None:
        return f"there is no tool '{call.name}'.{did_you_mean(call.name, functions)} Tools: {', '.join(functions)}"
    try:
        inspect.signature(function).bind(**call.arguments)
    except TypeError as error:
        return f"{call.name}: {error}"
    return None
