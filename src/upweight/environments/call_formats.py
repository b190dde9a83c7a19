"""What the policy writes -> the tool calls in it, in the formats that chat templates teach."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from upweight.environments.episode import ToolCall

HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
FENCE = re.compile(r"```(?:json|tool_call)?\s*|```", re.IGNORECASE)
ARGUMENTS = ("arguments", "parameters")
WRITE = 'write a call as {"name": "...", "arguments": {...}}'
Parsed = tuple[str, list[ToolCall]]


def parse_calls(text: str, form: str) -> Parsed:
    """The text without its calls, and the calls; one that is not well written carries its error."""
    return FORMATS[form](text)


def format_of(template: str) -> str:
    """The format that a chat template shows its model."""
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if PYTHON_TAG in template or '"parameters"' in template else "json"


def _hermes(text: str) -> Parsed:
    calls: list[ToolCall] = []
    for match in HERMES.finditer(text):
        if not match[2]:
            calls.append(_wrong("the call has no closing </tool_call>"))
            continue
        calls += _loaded(match[1])
    return HERMES.sub("", text).strip(), calls


def _llama3(text: str) -> Parsed:
    said, tag, written = text.partition(PYTHON_TAG)
    if not tag:
        said, written = "", text.strip()
        if not _begins_a_call(written):
            return text, []
    calls = [call for part in _objects(written) for call in _loaded(part)]
    return said.strip(), calls


def _json(text: str) -> Parsed:
    """Calls wherever an object with a name and arguments stands, in a fence or not."""
    calls: list[ToolCall] = []
    rest, start = [], 0
    while (brace := text.find("{", start)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace)
        except ValueError as error:
            rest.append(text[start : brace + 1])
            if _begins_a_call(text[brace:]):
                calls.append(_wrong(f"the call is no JSON: {error}"))
            start = brace + 1
            continue
        is_call = isinstance(value, dict) and "name" in value and any(key in value for key in ARGUMENTS)
        rest.append(text[start:brace] if is_call else text[start:end])
        calls += [_call(value)] if is_call else []
        start = end
    rest.append(text[start:])
    return (FENCE.sub("", "".join(rest)) if calls else text).strip(), calls


def _begins_a_call(written: str) -> bool:
    """Whether a text looks as if it were meant as a call."""
    return bool(re.match(r'\{\s*"name"\s*:', written)) and any(f'"{key}"' in written for key in ARGUMENTS)


def _objects(written: str) -> Iterator[str]:
    """The calls that semicolons separate; what is no JSON comes as it is."""
    while written := written.strip().removeprefix(";").strip():
        try:
            _, end = json.JSONDecoder().raw_decode(written)
        except ValueError:
            end = len(written)
        yield written[:end]
        written = written[end:]


def _loaded(written: str) -> list[ToolCall]:
    try:
        value = json.loads(written)
    except ValueError as error:
        return [_wrong(f"the call is no JSON: {error}")]
    return [_call(one) for one in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    """A call from its object; arguments may be JSON text once more."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _wrong("the call names no tool")
    given = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            return _wrong(f"the arguments are no JSON: {error}", value["name"])
    if not isinstance(given, dict):
        return _wrong("the arguments are no object", value["name"])
    return ToolCall(value["name"], given, id=value.get("id") if isinstance(value.get("id"), str) else None)


def _wrong(problem: str, name: str = "") -> ToolCall:
    return ToolCall(name, {}, error=f"{problem}; {WRITE}")


FORMATS: dict[str, Callable[[str], Parsed]] = {"hermes": _hermes, "llama3": _llama3, "json": _json}
