"""Python functions as tools: their schemas for the policy; how they are called; messages with their results."""

import inspect
import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from upweight.environments.episode import Message, ToolCall
from upweight.errors import UserError

Schema = Mapping[str, Any]
NOT_TOOLS = ("reset", "step", "get_reward", "close")  # methods of an environment class that are no tools


def schema_of(function: Callable[..., Any], key: str) -> Schema:
    """Return the JSON schema of a function: its name, description and arguments."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = get_json_schema(function)
    except Exception as error:  # reads the user's hints and docstrings, which may raise anything
        remedy = "Give each argument a type hint and a line under 'Args:' in the docstring."
        raise UserError(f"{key}: '{name}' cannot be described to the model: {error}. {remedy}") from error
    described = {part: value for part, value in schema["function"].items() if part != "return"}
    return {"type": "function", "function": described}


@cache
def methods_of(cls: type, key: str) -> dict[str, Schema]:
    """Return the schemas of the public methods of an environment class that have a docstring."""
    described = {name: method for name, method in public_methods(cls).items() if method.__doc__}
    bound = {name: types.MethodType(method, object()) for name, method in described.items()}
    return {name: schema_of(method, f"{key}: {cls.__name__}") for name, method in bound.items()}


def public_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of an environment class that are tools if they have a docstring."""
    methods = inspect.getmembers(cls, inspect.isfunction)
    return {name: method for name, method in methods if not name.startswith("_") and name not in NOT_TOOLS}


def tool_message(call: ToolCall, content: str | list[dict[str, Any]]) -> Message:
    call_id = {"tool_call_id": call.id} if call.id else {}
    return {"role": "tool", "name": call.name, "content": content, **call_id}


def opening_messages(prompt: Any, text: str | list[dict[str, Any]] = "") -> list[Message]:
    """Return a prompt's messages with `text` added: to the last message where that is the user's, else as a new one."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
    if not text:
        return messages
    if messages and messages[-1].get("role") == "user":
        content = messages[-1].get("content")
        if isinstance(content, str) and isinstance(text, str):
            return [*messages[:-1], {**messages[-1], "content": f"{content}\n\n{text}" if content else text}]
        if isinstance(text, list) or isinstance(content, list):  # with images
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
            more = text if isinstance(text, list) else [{"type": "text", "text": f"\n\n{text}"}]
            return [*messages[:-1], {**messages[-1], "content": [*parts, *more]}]
    return [*messages, {"role": "user", "content": text}]


def as_content(value: Any) -> str | list[dict[str, Any]]:
    """Return what a tool returned as the content of a message: parts where an image is in it, else text."""
    return image_parts(value) or as_text(value)


def image_parts(value: Any) -> list[dict[str, Any]] | None:
    """Return an image, or a list of texts and images, as content parts; None if there is no image in it."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) or is_image(item) for item in items):
        return None
    if all(isinstance(item, str) for item in items):
        return None
    return [_part(item) for item in items]


def is_image(item: Any) -> bool:
    """Return whether a value is an image of Pillow's, or a content part that holds one."""
    if isinstance(item, Mapping):
        return item.get("type") in ("image", "image_url", "input_image")
    return callable(getattr(item, "convert", None)) and callable(getattr(item, "save", None))  # of Pillow


def _part(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    return dict(item) if isinstance(item, Mapping) else {"type": "image", "image": item}


def as_text(value: Any) -> str:
    """Return what a tool or an environment returned as the policy reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
