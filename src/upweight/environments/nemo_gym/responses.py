"""Translates to and from the Responses API, which the Gym's servers and agents speak."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from upweight.environments.episode import Message, ToolCall, Turn
from upweight.environments.nemo_gym.servers import GymFault, excerpt

Item = dict[str, Any]
IDS, PROMPT, LOGPS = "generation_token_ids", "prompt_token_ids", "generation_log_probs"


def items_of(turn: Turn, calls: Sequence[tuple[str, ToolCall]], number: int) -> list[Item]:
    """The items of one turn: its text, and its calls with their ids."""
    text, status = turn.content if calls else turn.text, "completed" if turn.finished else "incomplete"
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"id": f"msg_{number}", "role": "assistant", "type": "message", "status": status, "content": content}
    items = [message] if text or not calls else []
    for identity, call in calls:
        # Arguments that could not be parsed are sent as none: verifiers parse them, and break on what is no JSON.
        arguments = json.dumps({} if call.error else dict(call.arguments), default=str)
        item = {"type": "function_call", "id": identity, "call_id": identity, "status": "completed"}
        items.append(item | {"name": call.name, "arguments": arguments})
    return items


def response_of(items: Sequence[Item], params: Mapping[str, Any], model: str) -> Item:
    """All turns as the response that a model server would have given."""
    parallel = bool(params.get("parallel_tool_calls", True))
    calls = {"parallel_tool_calls": parallel, "tool_choice": params.get("tool_choice") or "auto"}
    written = {"id": "resp_0", "created_at": 0, "model": model, "object": "response", "output": list(items)}
    return written | calls | {"tools": params.get("tools") or []}


def verification_of(answer: httpx.Response) -> Mapping[str, Any]:
    """The verification in an answer; GymFault where it has no reward for the policy."""
    route = answer.request.url.path
    try:
        verification = answer.json() if answer.status_code == httpx.codes.OK else None
    except (ValueError, RecursionError):
        verification = None
    if not isinstance(verification, Mapping):
        raise GymFault(f"{route}: {excerpt(answer)}")
    if verification.get("_ng_failure_class"):
        raise GymFault(f"{route}: {verification['_ng_failure_class']}")
    if verification.get("mask_sample"):
        reason = verification.get("failure_reason") or verification.get("failure_kind") or "no reason given"
        raise GymFault(f"{route}: the sample is to be masked: {reason}")
    reward = verification.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise GymFault(f"{route}: the reward is {reward!r}")
    return verification


class AgentTurn(NamedTuple):
    """The tokens of an agent's request to the policy and of its answer."""

    prompt: list[int]
    ids: list[int]
    logps: list[float]


def turns_of(run: Mapping[str, Any]) -> list[AgentTurn]:
    """The turns in an agent's answer to `/run`; GymFault where their tokens are not all there."""
    turns = []
    for item in _output(run):
        if item.get(IDS) is None:
            continue
        ids, prompt, logps = (item.get(key) or [] for key in (IDS, PROMPT, LOGPS))
        if not ids or not prompt or len(ids) != len(logps):
            counts = f"{len(prompt)} prompt tokens, {len(ids)} written ones and {len(logps)} log-probs"
            raise GymFault(f"/run: a turn has {counts}")
        logps = [float(logp) for logp in logps]
        if not all(map(math.isfinite, logps)):
            raise GymFault("/run: a log-prob is not finite")
        turns.append(AgentTurn([int(token) for token in prompt], [int(token) for token in ids], logps))
    if not turns:
        needs = "the Gym's model server needs 'return_token_id_information: true', and prompts room in its context"
        raise GymFault(f"/run: no token ids came back: {needs}")
    return turns


def messages_of(run: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    for item in _output(run):
        kind = item.get("type")
        if kind == "message":
            parts = item.get("content") or []
            text = parts if isinstance(parts, str) else "".join(str(part.get("text") or "") for part in parts)
            messages.append({"role": "assistant", "content": text})
        elif kind == "function_call":
            try:
                arguments = json.loads(item["arguments"])
            except (KeyError, TypeError, ValueError, RecursionError):
                arguments = {"text": str(item.get("arguments"))}
            call = {"name": item.get("name"), "arguments": arguments}
            called = {"type": "function", "id": item.get("call_id"), "function": call}
            messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        elif kind == "function_call_output":
            content = str(item.get("output"))
            messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
    return messages


def is_finished(run: Mapping[str, Any]) -> bool:
    """Whether the last turn ended by itself, with an answer and not in the middle of calls."""
    output = _output(run)
    return not run["response"].get("incomplete_details") and bool(output) and output[-1].get("type") == "message"


def _output(run: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    response = run.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        raise GymFault("/run: the answer holds no output")
    return output
