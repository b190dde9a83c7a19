"""The format of NeMo Gym: rows with a request to a model and the columns that its verifier reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from upweight.data.examples import Example, Format, Prompt, Setup
from upweight.data.raw_row import PREPARED_COLUMNS, Row, RowError, check_all_text, describe_value
from upweight.data.tokenize.messages import Conversation, without_nulls

PARAMS = "responses_create_params"
SERVER = "nemo_gym_server"  # column that names the server which verifies a row
HIDDEN_COLUMN = "nemo_gym_hidden"  # column with the row's values whose names preparation uses itself


def gym(setup: Setup, row: Row) -> list[Example]:
    """Read the messages and tools of `responses_create_params`; the other columns are kept for the verifier."""
    params = row.get(PARAMS)
    if not isinstance(params, Mapping) or params.get("input") is None:
        raise RowError(PARAMS, f"a mapping with `input`, got {describe_value(params)}")
    messages = setup.reader.messages(_input_messages(params), f"{PARAMS}.input")
    conversation = setup.reader.conversation(Row(), messages)
    tools = tools_of(row)
    check_all_text(tools, f"{PARAMS}.tools")
    text = setup.template.prompt(Conversation(conversation.messages, tools or None))
    columns = {key: value for key, value in row.items() if key not in (*PREPARED_COLUMNS, SERVER) and value is not None}
    if setup.entry.server_name:
        columns[SERVER] = setup.entry.server_name
    if hidden := {key: row[key] for key in PREPARED_COLUMNS if row.get(key) is not None}:
        columns[HIDDEN_COLUMN] = hidden
    return [Prompt(conversation.messages, text, columns)]


def row_of(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the original row from a prepared one."""
    added = (*PREPARED_COLUMNS, SERVER, HIDDEN_COLUMN)
    kept = {key: value for key, value in prepared.items() if key not in added and value is not None}
    return kept | dict(prepared.get(HIDDEN_COLUMN) or {})


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a row as chat templates expect them."""
    tools = (row.get(PARAMS) or {}).get("tools") or []
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) and "name" in tool for tool in tools):
        raise RowError(f"{PARAMS}.tools", "a list of functions, each with a name")
    kept = ("name", "description", "parameters")
    functions = [{key: without_nulls(tool[key]) for key in kept if tool.get(key) is not None} for tool in tools]
    return [{"type": "function", "function": function} for function in functions]


def _input_messages(params: Mapping[str, Any]) -> Any:
    """Return the input as messages; in the Responses API tool calls and their outputs are separate items."""
    items, system = params["input"], params.get("instructions")
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items if isinstance(items, list) else [items]:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "function_call":
            call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else json.dumps(output)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        elif kind in (None, "message") and isinstance(item, Mapping):
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind != "reasoning":
            messages.append(item)  # the message reader raises the error about it
    return messages


FORMATS: dict[str, Format] = {"nemo_gym": gym}
