"""Converts turns to the Responses API, which the Gym's servers read, and reads their verifications."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from upweight.environments.episode import ToolCall, Turn
from upweight.environments.nemo_gym.client import GymFault, excerpt

Item = dict[str, Any]
NOT_DETAILS = ("responses_create_params", "response", "reward", "reward_components")


def items_of(turn: Turn, calls: Sequence[tuple[str, ToolCall]], number: int) -> list[Item]:
    """The items of one turn: its text, and its calls with their ids."""
    text = turn.content if calls else turn.text
    items = [] if calls and not text else [_message(text, f"msg_{number}", finished=turn.finished)]
    return [*items, *(_call(identity, call) for identity, call in calls)]


def output_item(identity: str, output: str) -> Item:
    """The item of a tool's output."""
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


def verification_of(answer: httpx.Response) -> Mapping[str, Any]:
    """The verification in an answer; GymFault where it has no reward for the policy."""
    try:
        verification = answer.json() if answer.status_code == httpx.codes.OK else None
    except ValueError:
        verification = None
    if not isinstance(verification, Mapping):
        raise GymFault(f"{answer.request.url.path}: {excerpt(answer)}")
    if verification.get("_ng_failure_class"):
        raise GymFault(f"{answer.request.url.path}: {verification['_ng_failure_class']}")
    if verification.get("mask_sample"):
        reason = verification.get("failure_reason") or verification.get("failure_kind") or "no reason given"
        raise GymFault(f"{answer.request.url.path}: the sample is to be masked: {reason}")
    reward = verification.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise GymFault(f"{answer.request.url.path}: the reward is {reward!r}")
    return verification


def rewards_of(verification: Mapping[str, Any], components: Sequence[str], name: str) -> dict[str, float]:
    """The rewards of a verification: its sum, or the components that the config names."""
    if not components:
        return {name: float(verification["reward"])}
    values = verification.get("reward_components")
    values = values if isinstance(values, Mapping) else {}
    lacking = [one for one in components if not isinstance(values.get(one), int | float)]
    if lacking:
        has = ", ".join(map(str, values)) or "none"
        raise GymFault(f"/verify: no reward component {', '.join(lacking)}; there is {has}")
    return {one: float(values[one]) for one in components}


def details_of(verification: Mapping[str, Any]) -> dict[str, Any]:
    """The single values that a server adds to its verification, for logs."""
    plain = bool | int | float | str
    return {key: value for key, value in verification.items() if key not in NOT_DETAILS and isinstance(value, plain)}


def _message(text: str, identity: str, *, finished: bool) -> Item:
    return {
        "id": identity,
        "role": "assistant",
        "type": "message",
        "status": "completed" if finished else "incomplete",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _call(identity: str, call: ToolCall) -> Item:
    # Arguments that could not be parsed are sent as none: verifiers parse them, and break on what is no JSON.
    arguments = {} if call.error else dict(call.arguments)
    return {
        "type": "function_call",
        "id": identity,
        "call_id": identity,
        "name": call.name,
        "arguments": json.dumps(arguments, default=str),
        "status": "completed",
    }
