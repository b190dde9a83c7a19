"""Reads the answer of an agent's `/run`: the tokens of each turn, and the conversation as messages."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upweight.environments.episode import Message
from upweight.environments.nemo_gym.client import GymFault

IDS, PROMPT, LOGPS = "generation_token_ids", "prompt_token_ids", "generation_log_probs"


@dataclass(frozen=True)
class AgentTurn:
    """The tokens of one request to the policy and of its answer."""

    prompt: list[int]
    ids: list[int]
    logps: list[float]


def turns_of(run: Mapping[str, Any]) -> list[AgentTurn]:
    """The turns of a rollout; GymFault where their tokens are not all there."""
    turns = []
    for item in _output(run):
        if item.get(IDS) is None:
            continue
        ids, prompt, logps = (item.get(key) or [] for key in (IDS, PROMPT, LOGPS))
        if not ids or not prompt or len(ids) != len(logps):
            raise GymFault(
                f"/run: a turn has {len(prompt)} prompt tokens, {len(ids)} written ones and {len(logps)} log-probs"
            )
        logps = [float(logp) for logp in logps]
        if not all(map(math.isfinite, logps)):
            raise GymFault("/run: a log-prob is not finite")
        turns.append(AgentTurn([int(token) for token in prompt], [int(token) for token in ids], logps))
    if not turns:
        raise GymFault(
            "/run: no token ids came back: the Gym's model server needs 'return_token_id_information: true', and "
            "prompts room in the server's context"
        )
    return turns


def messages_of(run: Mapping[str, Any]) -> list[Message]:
    """The conversation after the prompt."""
    messages: list[Message] = []
    for item in _output(run):
        kind = item.get("type")
        if kind == "message":
            parts = item.get("content") or []
            text = parts if isinstance(parts, str) else "".join(str(part.get("text") or "") for part in parts)
            messages.append({"role": "assistant", "content": text})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": _arguments(item.get("arguments"))}
            called = {"type": "function", "id": item.get("call_id"), "function": call}
            messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        elif kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "content": str(content), "tool_call_id": item.get("call_id")})
    return messages


def is_finished(run: Mapping[str, Any]) -> bool:
    """Whether the last turn ended by itself, with an answer and not in the middle of calls."""
    output = _output(run)
    is_cut = bool((run.get("response") or {}).get("incomplete_details"))
    return not is_cut and bool(output) and output[-1].get("type") == "message"


def _output(run: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    response = run.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        raise GymFault("/run: the answer holds no output")
    return output


def _arguments(value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return {"text": str(value)}
