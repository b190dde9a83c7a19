"""Parses the tool calls in a completion, in the formats that chat templates show to models."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from upweight.environments.episode import ToolCall

HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
FENCE = re.compile(r"```(?:json|tool_call)?\s*|```", re.IGNORECASE)
ARGUMENTS = ("arguments", "parameters")
UNREADABLE = (ValueError, RecursionError)  # the latter: a model may write thousands of brackets
REMEDY = 'write a call as {"name": "...", "arguments": {...}}'
Parsed = tuple[str, list[ToolCall]]


def parse_calls(text: str, form: str) -> Parsed:
    """Return the text without its tool calls, and the calls; a malformed call carries its error."""
    return FORMATS[form](text)


def call_format_of(template: str) -> str:
    """Return the name of the call format that a chat template shows."""
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if PYTHON_TAG in template or '"parameters"' in template else "json"


def _parse_hermes(text: str) -> Parsed:
    calls: list[ToolCall] = []
    for match in HERMES.finditer(text):
        calls += _parse_calls(match[1]) if match[2] else [_malformed_call("the call has no closing </tool_call>")]
    return HERMES.sub("", text).strip(), calls


def _llama3(text: str) -> Parsed:
    content, tag, calls = text.partition(PYTHON_TAG)
    if not tag:
        content, calls = "", text.strip()
        if not _begins_a_call(calls):
            return text, []
    return content.strip(), [call for part in _split_objects(calls) for call in _parse_calls(part)]


def _parse_json_calls(text: str) -> Parsed:
    """Parse every JSON object with a name and arguments as a call, in a code fence or not."""
    calls: list[ToolCall] = []
    rest, start = [], 0
    while (brace := text.find("{", start)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace)
        except UNREADABLE as error:
            rest.append(text[start : brace + 1])
            if _begins_a_call(text[brace:]):
                calls.append(_malformed_call(f"the call is no JSON: {error}"))
            start = brace + 1
            continue
        is_call = isinstance(value, dict) and "name" in value and any(key in value for key in ARGUMENTS)
        rest.append(text[start:brace] if is_call else text[start:end])
        calls += [_call_of_json(value)] if is_call else []
        start = end
    rest.append(text[start:])
    return (FENCE.sub("", "".join(rest)) if calls else text).strip(), calls


def _begins_a_call(text: str) -> bool:
    return bool(re.match(r'\{\s*"name"\s*:', text)) and any(f'"{key}"' in text for key in ARGUMENTS)


def _split_objects(text: str) -> Iterator[str]:
    """Yield the JSON objects that semicolons separate, and a rest that is no JSON as it is."""
    while text := text.strip().removeprefix(";").strip():
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except UNREADABLE:
            end = len(text)
        yield text[:end]
        text = text[end:]


def _parse_calls(text: str) -> list[ToolCall]:
    try:
        value = json.loads(text)
    except UNREADABLE as error:
        return [_malformed_call(f"the call is no JSON: {error}")]
    return [_call_of_json(entry) for entry in (value if isinstance(value, list) else [value])]


def _call_of_json(value: Any) -> ToolCall:
    """Return the call of a JSON object; its arguments may be a JSON string."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed_call("the call names no tool")
    arguments = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except UNREADABLE as error:
            return _malformed_call(f"the arguments are no JSON: {error}", value["name"])
    if not isinstance(arguments, dict):
        return _malformed_call("the arguments are no object", value["name"])
    return ToolCall(value["name"], arguments, id=value.get("id") if isinstance(value.get("id"), str) else None)


def _malformed_call(problem: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, error=f"{problem}; {REMEDY}")


FORMATS: dict[str, Callable[[str], Parsed]] = {"hermes": _parse_hermes, "llama3": _llama3, "json": _parse_json_calls}
