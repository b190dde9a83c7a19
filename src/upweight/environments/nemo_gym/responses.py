"""Between turns and the Responses API, in which the Gym's servers are told what the policy wrote."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from upweight.environments.episode import ToolCall, Turn
from upweight.environments.nemo_gym.client import GymFault, said

Item = dict[str, Any]
NOT_TOLD = ("responses_create_params", "response", "reward", "reward_components")


def items_of(turn: Turn, calls: Sequence[tuple[str, ToolCall]], number: int) -> list[Item]:
    """What one turn wrote: its text, and its calls by their ids."""
    text = turn.content if calls else turn.text
    items = [] if calls and not text else [_message(text, f"msg_{number}", finished=turn.finished)]
    return [*items, *(_call(identity, call) for identity, call in calls)]


def output_item(identity: str, output: str) -> Item:
    """What a tool answered."""
    return {"type": "function_call_output", "call_id": identity, "output": output}


def response_of(items: Sequence[Item], params: Mapping[str, Any], model: str) -> Item:
    """All turns as the response that a model server would have given."""
    return {
        "id": "resp_0",
        "created_at": 0,
        "model": model,
        "object": "response",
        "output": list(items),
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
    }


def verdict(answer: httpx.Response) -> Mapping[str, Any]:
    """What a verification says; GymFault where it says nothing about the policy."""
    try:
        found = answer.json() if answer.status_code == httpx.codes.OK else None
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise GymFault(f"{answer.request.url.path}: {said(answer)}")
    if found.get("_ng_failure_class"):
        raise GymFault(f"{answer.request.url.path}: {found['_ng_failure_class']}")
    if found.get("mask_sample"):
        reason = found.get("failure_reason") or found.get("failure_kind") or "no reason given"
        raise GymFault(f"{answer.request.url.path}: the sample is to be masked: {reason}")
    reward = found.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise GymFault(f"{answer.request.url.path}: the reward is {reward!r}")
    return found


def rewards_of(found: Mapping[str, Any], components: Sequence[str], name: str) -> dict[str, float]:
    """The rewards of a verdict: its sum, or the components that were asked for."""
    if not components:
        return {name: float(found["reward"])}
    given = found.get("reward_components")
    given = given if isinstance(given, Mapping) else {}
    lacking = [one for one in components if not isinstance(given.get(one), int | float)]
    if lacking:
        has = ", ".join(map(str, given)) or "none"
        raise GymFault(f"/verify: no reward component {', '.join(lacking)}; there is {has}")
    return {one: float(given[one]) for one in components}


def told(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a server adds to its verdict in single values, for people to read."""
    plain = bool | int | float | str
    return {key: value for key, value in found.items() if key not in NOT_TOLD and isinstance(value, plain)}


def _message(text: str, identity: str, *, finished: bool) -> Item:
    return {
        "id": identity,
        "role": "assistant",
        "type": "message",
        "status": "completed" if finished else "incomplete",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _call(identity: str, call: ToolCall) -> Item:
    # Arguments that could not be read are told as none: verifiers parse them, and break on what is no JSON.
    arguments = {} if call.error else dict(call.arguments)
    return {
        "type": "function_call",
        "id": identity,
        "call_id": identity,
        "name": call.name,
        "arguments": json.dumps(arguments, default=str),
        "status": "completed",
    }
