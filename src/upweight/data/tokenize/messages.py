"""Converts the messages of rows into the messages that chat templates expect."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from upweight.config.sections.data import DatasetRow
from upweight.data.raw_row import (
    RawRow,
    RowError,
    check_all_text,
    checked_list,
    checked_text,
    describe_value,
    lookup,
    optional_text,
)

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

    def __init__(self, entry: DatasetRow, default_system: str | None = None) -> None:
        self.default_system = default_system
        self.drop_system = entry.drop_system_message
        self.split_thinking = entry.split_thinking
        self.system_key = entry.field_system
        self.tools_key = entry.field_tools
        self.thinking_from = entry.field_thinking or "reasoning_content"
        self.thinking_to = entry.template_thinking_key or "reasoning_content"
        renamed = {"role": entry.message_field_role, "content": entry.message_field_content}
        self.names = {**{k: v for k, v in renamed.items() if v}, **(entry.message_property_mappings or {})}
        self.roles = {source: role for role, sources in ROLES.items() for source in sources}
        for role, sources in (entry.roles or {}).items():
            self.roles[role] = role
            self.roles |= dict.fromkeys([sources] if isinstance(sources, str) else sources, role)

    def conversation(self, row: RawRow, messages: list[Message], key: str = "") -> Conversation:
        """Return messages with the row's tools and template variables, and with a system message if one is set."""
        if self.drop_system:
            messages = [message for message in messages if message["role"] != "system"]
        if (system := self.system(row)) and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        variables = lookup(row, "chat_template_kwargs")
        if variables is not None and not isinstance(variables, Mapping):
            raise RowError("chat_template_kwargs", f"a mapping, got {describe_value(variables)}")
        check_all_text(variables, "chat_template_kwargs")
        return Conversation(messages, self._tools(row, key), without_nulls(variables or {}))

    def system(self, row: RawRow) -> str:
        """Return the system text of the row's column if the entry names one, else the default."""
        column_text = optional_text(row, self.system_key) if self.system_key else ""
        return (column_text if not self.drop_system else "") or self.default_system or ""

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
            return [self.message({"role": "assistant", **value} if not self._role(value) else value, key)]
        messages = self.messages(value, key)
        if messages[-1]["role"] != "assistant":
            raise RowError(key, f"an assistant turn at the end, got one with the role '{messages[-1]['role']}'")
        return messages

    def message(self, value: Any, key: str) -> Message:
        """Read one message and convert its property names and role to those that templates expect."""
        if not isinstance(value, Mapping):
            raise RowError(key, f"a message with role and content, got {describe_value(value)}")
        check_all_text(value, key)
        consumed = {self._name(value, name) for name in ("role", "content")} | set(self.names.values())
        message: Message = {"role": self._known_role(value, key)}
        for name, source in self.names.items():
            if name not in ("role", "content") and value.get(source) is not None:
                message[name] = without_nulls(value[source])
        for name, inner in value.items():
            if name not in consumed and name not in message and inner is not None:
                message[name] = without_nulls(inner)
        content_name = self._name(value, "content")
        message["content"] = self._content(value.get(content_name), f"{key}.{content_name}", "tool_calls" in message)
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{key}.tool_calls")
        return self._with_thinking(message)

    def _name(self, value: Mapping[str, Any], name: str) -> str:
        if name in self.names:
            return self.names[name]
        return SHAREGPT_NAMES[name] if name not in value and SHAREGPT_NAMES[name] in value else name

    def _role(self, value: Mapping[str, Any]) -> Any:
        return value.get(self._name(value, "role"))

    def _known_role(self, value: Mapping[str, Any], key: str) -> str:
        name, role = self._name(value, "role"), self._role(value)
        if isinstance(role, str) and role in self.roles:
            return self.roles[role]
        known = ", ".join(dict.fromkeys(self.roles.values()))
        shown = f"'{role}'" if isinstance(role, str) else describe_value(role)
        raise RowError(f"{key}.{name}", f"one of {known} (`roles` maps other names), got {shown}")

    def _content(self, value: Any, key: str, may_be_empty: bool) -> str:
        if isinstance(value, list | tuple) and value:
            parts = []
            for number, part in enumerate(value):
                if not isinstance(part, Mapping) or part.get("type", "text") not in TEXT_PARTS:
                    raise RowError(f"{key}[{number}]", "a part of type text (images and sound are not supported)")
                parts.append(checked_text(part.get("text"), f"{key}[{number}].text", empty=True))
            return "".join(parts)
        if value is None and may_be_empty:
            return ""
        return checked_text(value, key, empty=True)

    def _with_thinking(self, message: Message) -> Message:
        if self.thinking_from in message:
            message[self.thinking_to] = message.pop(self.thinking_from)
        if self.split_thinking and message["role"] == "assistant" and (match := THINKING.match(message["content"])):
            message[self.thinking_to] = match[1].strip("\n")
            message["content"] = message["content"][match.end() :]
        return message

    def _tools(self, row: RawRow, messages_key: str) -> list[Any] | None:
        parent = messages_key.rpartition(".")[0]
        key = self.tools_key or (f"{parent}.tools" if parent else "tools")
        value = lookup(row, key)
        if isinstance(value, str) and value:
            try:
                value = json.loads(value)
            except ValueError as error:
                raise RowError(key, f"tool definitions as a list or as JSON text ({error})") from error
        if value is None or value in ([], ""):
            return None
        tools = checked_list(value, key, "tool definitions")
        for number, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise RowError(f"{key}[{number}]", f"a tool definition, got {describe_value(tool)}")
        check_all_text(tools, key)
        return [_tool(without_nulls(tool)) for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool definition with its fields under `function`, as templates expect it."""
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_calls(value: Any, key: str) -> list[Any]:
    """Return tool calls with their arguments as mappings; rows often hold them as JSON text."""
    calls = []
    for number, item in enumerate(checked_list(value, key, "tool calls")):
        if not isinstance(item, Mapping):
            raise RowError(f"{key}[{number}]", f"a tool call, got {describe_value(item)}")
        call = dict(item)
        if "name" in call and "function" not in call:
            call = {"type": "function", "function": call}
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # the template shows invalid JSON as the model wrote it
                call["function"] = {**function, "arguments": json.loads(function["arguments"])}
        calls.append(call)
    return calls


def without_nulls(value: Any) -> Any:
    """Return the value without null properties, which Arrow tables add where rows differ."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(inner) for inner in value]
    return value
