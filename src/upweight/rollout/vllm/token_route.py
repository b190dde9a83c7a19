"""The route of a vLLM server that takes and returns token ids: with images, and with the experts that were chosen."""

from collections.abc import Mapping, Sequence
from typing import Any

from upweight.errors import UserError
from upweight.rollout.vllm.client import RequestFailed, RequestRefused

GENERATE = "/inference/v1/generate"


def token_request(ids: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for the completions of a prompt, from the fields of one to /v1/completions."""
    sampling = {name: value for name, value in fields.items() if name != "return_token_ids"}
    return {"token_ids": list(ids), "sampling_params": sampling, "return_token_ids": True}


def choices_of(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer in the form of /v1/completions."""
    return [_as_choice(choice, answer.get("prompt_token_ids")) for choice in answer["choices"]]


def explained(error: RequestRefused, url: str, what: str) -> UserError:
    """Return the error for a server that refuses a request for `what`, which only this route can do."""
    if error.status in (403, 404):
        remedy = "set 'vllm.enable_scale_out: true' and start vLLM 0.32 or later with `upweight vllm-serve`"
        return UserError(f"the vLLM server at {url} takes no {what} ({error}): {remedy}")
    return UserError(f"the vLLM server at {url} refuses {what}: {error}")


def _as_choice(choice: Mapping[str, Any], prompt: Any) -> dict[str, Any]:
    content = (choice.get("logprobs") or {}).get("content")
    if content is None or choice.get("token_ids") is None:
        raise RequestFailed("an answer without tokens or log-probs")
    logps = {"token_logprobs": [one["logprob"] for one in content]}
    return {**choice, "prompt_token_ids": prompt, "logprobs": logps}
