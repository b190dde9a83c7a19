"""Converts the messages of rows into the messages that chat templates expect."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from upweight.config.sections.data import DatasetSpec
from upweight.data.raw_row import Row, RowError, check_all_text, checked_mappings, checked_text, describe_value

Message = dict[str, Any]

ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model", "chatbot", "bot"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation"),
}
SHAREGPT_NAMES = {"role": "from", "content": "value"}  # property names of ShareGPT conversations
TEXT_PARTS = ("text", "input_text", "output_text")
THINKING = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools they may call, and the row's variables for the chat template."""

    messages: list[Message]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def then(self, *more: Message) -> "Conversation":
        return Conversation([*self.messages, *more], self.tools, self.variables)

    def upto(self, count: int) -> "Conversation":
        return Conversation(self.messages[:count], self.tools, self.variables)


class MessageReader:
    """Reads messages with the role and property names of one entry of `datasets`."""

    def __init__(self, entry: DatasetSpec, default_system: str | None = None) -> None:
        self.entry, self.default_system = entry, default_system
        self.thinking_to = entry.template_thinking_key or "reasoning_content"
        renamed = {"role": entry.message_field_role, "content": entry.message_field_content}
        self.names = {**{k: v for k, v in renamed.items() if v}, **(entry.message_property_mappings or {})}
        self.roles = {source: role for role, sources in ROLES.items() for source in sources}
        for role, sources in (entry.roles or {}).items():
            self.roles[role] = role
            self.roles |= dict.fromkeys([sources] if isinstance(sources, str) else sources, role)

    def conversation(self, row: Row, messages: list[Message], key: str = "") -> Conversation:
        """Return messages with the row's tools and template variables, and with a system message if one is set."""
        if self.entry.drop_system_message:
            messages = [message for message in messages if message["role"] != "system"]
        if (system := self.system(row)) and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        variables = row.value("chat_template_kwargs")
        if variables is not None and not isinstance(variables, Mapping):
            raise RowError("chat_template_kwargs", f"a mapping, got {describe_value(variables)}")
        check_all_text(variables, "chat_template_kwargs")
        return Conversation(messages, self._tools_of_row(row, key), without_nulls(variables or {}))

    def system(self, row: Row) -> str:
        """Return the system text of the row's column if the entry names one, else the default."""
        key = None if self.entry.drop_system_message else self.entry.field_system
        return (row.optional_text(key) if key else "") or self.default_system or ""

    def messages(self, value: Any, key: str) -> list[Message]:
        """Read a list of messages, or plain text as one user message."""
        if isinstance(value, str):
            return [{"role": "user", "content": checked_text(value, key)}]
        if not isinstance(value, list | tuple) or not value:
            raise RowError(key, f"text or a list of messages, got {describe_value(value)}")
        return [self.message(item, f"{key}[{number}]") for number, item in enumerate(value)]

    def responses(self, value: Any, key: str) -> list[Message]:
        """Read the assistant's completion: text, one message, or the messages of several turns."""
        if isinstance(value, str):
            return [{"role": "assistant", "content": checked_text(value, key)}]
        if isinstance(value, Mapping):
            has_role = value.get(self._name_in_row(value, "role"))
            return [self.message(value if has_role else {"role": "assistant", **value}, key)]
        messages = self.messages(value, key)
        if messages[-1]["role"] != "assistant":
            raise RowError(key, f"an assistant turn at the end, got one with the role '{messages[-1]['role']}'")
        return messages

    def message(self, value: Any, key: str) -> Message:
        """Read one message and convert its property names and role to those that templates expect."""
        if not isinstance(value, Mapping):
            raise RowError(key, f"a message with role and content, got {describe_value(value)}")
        if (plain := self._plain_message(value, key)) is not None:
            return plain
        check_all_text(value, key)
        role_name, content_name = self._name_in_row(value, "role"), self._name_in_row(value, "content")
        role = value.get(role_name)
        if not isinstance(role, str) or role not in self.roles:
            known = ", ".join(dict.fromkeys(self.roles.values()))
            shown = f"'{role}'" if isinstance(role, str) else describe_value(role)
            raise RowError(f"{key}.{role_name}", f"one of {known} (`roles` maps other names), got {shown}")
        renamed = {name: value.get(source) for name, source in self.names.items() if name not in ("role", "content")}
        message: Message = {"role": self.roles[role], **without_nulls(renamed)}
        consumed = {role_name, content_name, *self.names.values(), *message}
        message |= without_nulls({name: inner for name, inner in value.items() if name not in consumed})
        if content_name not in value and "tool_calls" not in message:
            names = ", ".join(map(str, value))
            renaming = "`message_property_mappings` says which holds its content"
            raise RowError(f"{key}.{content_name}", f"text, got nothing; the message has {names} ({renaming})")
        message["content"] = _text_content(value.get(content_name), f"{key}.{content_name}", "tool_calls" in message)
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{key}.tool_calls")
        thinking_from = self.entry.field_thinking or "reasoning_content"
        if thinking_from in message:
            message[self.thinking_to] = message.pop(thinking_from)
        splits = self.entry.split_thinking and message["role"] == "assistant"
        if splits and (match := THINKING.match(message["content"])):
            message[self.thinking_to] = match[1].strip("\n")
            message["content"] = message["content"][match.end() :]
        return message

    def _plain_message(self, value: Mapping[str, Any], key: str) -> Message | None:
        """Return a message of a role and text alone, as most are; None where there is more to read."""
        role, content = value.get("role"), value.get("content")
        if len(value) != 2 or self.names or self.entry.split_thinking or not isinstance(content, str):
            return None
        if not isinstance(role, str) or role not in self.roles:
            return None
        return {"role": self.roles[role], "content": checked_text(content, f"{key}.content", empty=True)}

    def _name_in_row(self, value: Mapping[str, Any], name: str) -> str:
        if name in self.names:
            return self.names[name]
        return SHAREGPT_NAMES[name] if name not in value and SHAREGPT_NAMES[name] in value else name

    def _tools_of_row(self, row: Row, messages_key: str) -> list[Any] | None:
        parent = messages_key.rpartition(".")[0]
        key = self.entry.field_tools or (f"{parent}.tools" if parent else "tools")
        value = row.value(key)
        if isinstance(value, str) and value:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RowError(key, f"tool definitions as a list or as JSON text ({error})") from error
        if value is None or (isinstance(value, str | list) and not value):
            return None
        tools = checked_mappings(value, key, "a tool definition", "tool definitions")
        check_all_text(tools, key)
        return [_tool_definition(without_nulls(tool)) for tool in tools]


def _text_content(value: Any, key: str, may_be_missing: bool) -> str:
    if isinstance(value, list | tuple) and value:
        parts = []
        for number, part in enumerate(value):
            if not isinstance(part, Mapping) or part.get("type", "text") not in TEXT_PARTS:
                raise RowError(f"{key}[{number}]", _expected_part(part))
            parts.append(checked_text(part.get("text"), f"{key}[{number}].text", empty=True))
        return "".join(parts)
    return "" if value is None and may_be_missing else checked_text(value, key, empty=True)


def _expected_part(part: Any) -> str:
    """Return what is expected in place of a content part that is no text; a model's images are read before."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return f"a part with type and text, got {describe_value(part)}"
    if kind in ("image", "image_url", "input_image"):
        return "a part of type text (this model reads no images)"
    return f"a part of type text, or an image for a model that reads images; '{kind[:30]}' is not read: leave it out"


def _tool_definition(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool definition with its fields under `function`, as templates expect it."""
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_calls(value: Any, key: str) -> list[Any]:
    """Return tool calls with their arguments as mappings; rows often hold them as JSON text."""
    calls = []
    for item in checked_mappings(value, key, "a tool call", "tool calls"):
        is_function = "name" in item and "function" not in item
        call = {"type": "function", "function": item} if is_function else dict(item)
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            with suppress(ValueError, RecursionError):  # the template shows invalid JSON as the model wrote it
                call["function"] = {**function, "arguments": json.loads(function["arguments"])}
        calls.append(call)
    return calls


def without_nulls(value: Any) -> Any:
    """Return the value without null properties, which Arrow tables add where rows differ."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value
