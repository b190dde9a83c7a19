"""Reads the JSON of OpenAI's completions API: a prompt, how to sample, and how to answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from upweight.errors import did_you_mean
from upweight.types import Sampling

# Names of numbers: how they are read, and their least and greatest values.
NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 100),
    "top_p": (float, 1e-6, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-3, 100),
    "top_k": (int, 0, 1 << 31),
    "seed": (int, 0, 1 << 62),
    "max_tokens": (int, 1, 1 << 31),
    "max_completion_tokens": (int, 1, 1 << 31),
    "n": (int, 1, 64),
}
WITHOUT_EFFECT = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # what is not supported may be sent with these values
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "functions": (None, []), "logprobs": (None, False),
    "top_logprobs": (None, 0), "logit_bias": (None, {}), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}), "parallel_tool_calls": (None, True, False), "echo": (None, False),
    "best_of": (None, 1), "suffix": (None, ""), "modalities": (None, ["text"]), "audio": (None,),
}  # fmt: skip
OTHERS = {"model", "messages", "prompt", "stop", "stream", "stream_options"}
ROLES = {"developer": "system"}  # OpenAI's newer name


class BadRequest(ValueError):
    """A request that cannot be answered, with the name of the field that is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True)
class CompletionRequest:
    """A request for completions of one prompt."""

    model: str | None
    prompt: str | list[dict[str, str]]
    sampling: Sampling
    max_tokens: int | None
    count: int
    stream: bool
    with_usage: bool  # at the end of a stream


def read_request(body: Any, defaults: Mapping[str, Any], *, chat: bool) -> CompletionRequest:
    """Read the body of a request; `defaults` are values of fields that it leaves out."""
    if not isinstance(body, dict):
        raise BadRequest("body", "expected a JSON object")
    _refuse_unsupported(body)
    numbers = {name: _number(name, body.get(name, defaults.get(name))) for name in NUMBERS}
    given = {name: value for name, value in numbers.items() if value is not None}
    limit = given.pop("max_completion_tokens", None) or given.pop("max_tokens", None)
    given.pop("max_tokens", None)
    count, stream = given.pop("n", 1), body.get("stream") or False
    if stream and count > 1:
        raise BadRequest("n", "a stream has one completion; leave out `n` or `stream`")
    if count > 1 and given.get("temperature") == 0:
        raise BadRequest("n", "temperature 0 always gives the same completion; leave out `n`, or raise it")
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise BadRequest("stop", "expected a text or a list of texts")
    prompt: Any = _messages(body.get("messages")) if chat else body.get("prompt")
    if not chat and not isinstance(prompt, str):
        raise BadRequest("prompt", "expected one text")
    options = body.get("stream_options") or {}
    with_usage = bool(isinstance(options, dict) and options.get("include_usage"))
    sampling = Sampling(1, stop_strings=tuple(stops), **given)
    return CompletionRequest(body.get("model"), prompt, sampling, limit, count, bool(stream), with_usage)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    known = {*NUMBERS, *WITHOUT_EFFECT, *NEUTRAL, *OTHERS}
    for name, value in body.items():
        if name not in known:
            raise BadRequest(name, f"unknown field.{did_you_mean(name, known)}")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise BadRequest(name, "not supported here; serve the model with vLLM (`upweight serve --backend vllm`)")


def _number(name: str, value: Any) -> Any:
    kind, least, greatest = NUMBERS[name]
    if value is None:
        return None
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not whole):
        raise BadRequest(name, f"expected a {'whole ' if kind is int else ''}number, got {value!r:.40}")
    if name == "top_k" and value == -1:  # vLLM's way of saying that there is no limit
        return 0
    if not least <= value <= greatest:
        raise BadRequest(name, f"expected {least:g} to {greatest:g}, got {value!r:.40}")
    return kind(value)


def _messages(messages: Any) -> list[dict[str, str]]:
    """Return messages with plain texts; parts of text are joined."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages", "expected a list of messages")
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{number}]", "expected an object with `role` and `content`")
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise BadRequest(f"messages[{number}]", "only parts of text are supported")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise BadRequest(f"messages[{number}]", "its `content` is no text")
        plain.append({"role": ROLES.get(message["role"], message["role"]), "content": content})
    return plain
