"""Checks that a server serves the trained model: by its name, its vocabulary and its log-probs."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn

from upweight.errors import UserError
from upweight.models.modules import dropout_off, unwrap_peft
from upweight.rollout.sampling_params import completion_fields
from upweight.rollout.vllm.client import RequestRefused, VllmClient
from upweight.types import Sampling

TOP_LOGPS = 5  # most likely tokens that are compared
LENGTH, PROMPT = 24, 8  # tokens of a probe, and of its prompt
FLOAT32_LIMIT = 1e-3  # largest difference in float32; kernels differ by 5e-5
# Mean difference in half precision: a bfloat16 server differs by 0.05 from itself, another model by 1 and more.
MEAN_LIMIT = 0.25


async def served_base(client: VllmClient, model_name: str | None) -> tuple[str, int | None]:
    """Return the server's name for the trained model, and its maximal sequence length."""
    entries = (await client.ask("/v1/models"))["data"]
    bases = [entry for entry in entries if entry.get("parent") is None]
    for entry in bases:
        if any(same_model(model_name or "", str(entry.get(key) or "")) for key in ("id", "root")):
            return entry["id"], entry.get("max_model_len")
    names = ", ".join(repr(entry["id"]) for entry in bases)
    served = f"the server at {client.url} serves {names}, but base_model is {model_name!r}"
    raise UserError(f"{served}. Serve that, or fix the address.")


def same_model(one: str, other: str) -> bool:
    """Whether two names mean one model: the same folder, or the same last part (a hub id and its cache folder)."""
    if not one or not other:
        return False
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return _last_name(one) == _last_name(other)


def _last_name(name: str) -> str:
    stored = re.search(r"models--[^/]+--([^/]+)/snapshots/", name)
    return (stored[1] if stored else name.rstrip("/").rpartition("/")[2]).lower()


async def check_vocabulary(client: VllmClient, name: str, size: int) -> None:
    """Raise a UserError for a server with fewer or more tokens than the model, by the logit biases that it accepts."""
    # A prompt of such a token is no test: where the tokenizer has it and the model does not, vLLM accepts it and
    # crashes.
    for token, known in ((size - 1, True), (size, False)):
        body = {"model": name, "prompt": [0], "max_tokens": 1, "logit_bias": {str(token): 0.0}}
        try:
            await client.ask("/v1/completions", body, seconds=None)
            accepted = True
        except RequestRefused as error:
            if "vocab" not in str(error):
                raise UserError(f"the server at {client.url} refuses to write: {error}") from None
            accepted = False
        if accepted != known:
            raise UserError(
                f"the server at {client.url} knows {'more' if accepted else 'fewer'} tokens than the {size} of the "
                "model: serve the vocabulary that is trained (with new `tokens`, save the model with them first)."
            )


def probe_prompt(size: int) -> list[int]:
    return np.random.default_rng(7).integers(0, size, PROMPT).tolist()


def probe_fields(temperature: float) -> dict[str, Any]:
    return completion_fields(1, Sampling(LENGTH - PROMPT, temperature)) | {"ignore_eos": True}


async def ask_probe(client: VllmClient, name: str, size: int, temperature: float) -> tuple[list[int], list[float]]:
    """Return a prompt with the tokens that the server samples after it, and their log-probs."""
    prompt = probe_prompt(size)
    body = probe_fields(temperature) | {"model": name, "prompt": prompt, "return_token_ids": True}
    choice = (await client.ask("/v1/completions", body, seconds=None))["choices"][0]
    if choice.get("token_ids") is None or choice.get("logprobs") is None:
        raise UserError(f"the server at {client.url} does not return token ids and log-probs; use vLLM 0.26 or later.")
    return [*prompt, *choice["token_ids"]], choice["logprobs"]["token_logprobs"]


def difference(
    model: nn.Module,
    ids: Sequence[int],
    reported_logps: Sequence[float],
    temperature: float,
    *,
    adapted: bool,
    prompt: int = PROMPT,
    images: Mapping[str, Tensor] | None = None,
    never: int | None = None,
) -> tuple[float, float]:
    """Return the mean and the largest difference between the log-probs of server and model, `adapted` or not.

    `prompt`: tokens before the sampled ones; `images`: what a forward reads beside ids; `never`: a token that was not
    to be drawn, which the server's log-probs may leave out.
    """
    base = unwrap_peft(model)
    if max(ids) >= base.config.get_text_config().vocab_size or len(reported_logps) != len(ids) - prompt:
        return float("inf"), float("inf")
    off: Any = contextlib.nullcontext()
    if isinstance(model, PeftModel) and not adapted:
        off = model.disable_adapter()
    with torch.no_grad(), dropout_off(model), off:
        ids_BN = torch.tensor([list(ids)], device=base.device)
        inputs = {name: value.to(base.device) for name, value in (images or {}).items()}
        logits_NV = model(input_ids=ids_BN, use_cache=False, **inputs).logits[0, prompt - 1 : -1].float() / temperature
        trainer_logps = logits_NV.log_softmax(-1).gather(1, ids_BN[0, prompt:, None])[:, 0].cpu()
        both = [trainer_logps]
        if never is not None:
            both.append(trainer_logps - torch.log1p(-logits_NV.softmax(-1)[:, never]).cpu())
    apart = min(((logps - torch.tensor(reported_logps)).abs() for logps in both), key=lambda one: float(one.mean()))
    return float(apart.mean()), float(apart.max())


def agrees(mean: float, largest: float, *, exact: bool) -> bool:
    """Whether server and trainer have the same weights; `exact` where both compute in float32. NaN never agrees."""
    return largest <= FLOAT32_LIMIT if exact else mean <= MEAN_LIMIT


async def applies_temperature(client: VllmClient, name: str, size: int) -> bool:
    """Whether a server reports log-probs at the sampling temperature: a low one widens their spread then."""
    plain, sharp = [await top_logps_of(client, name, probe_prompt(size), temperature) for temperature in (1.0, 0.25)]
    return sharp[0] - sharp[-1] >= 2 * (plain[0] - plain[-1])


async def top_logps_of(client: VllmClient, name: str, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probs of the most likely next tokens, best first; the same weights give the same values."""
    # `prompt_logprobs` are no choice: requested from an adapter beside other requests, they crash vLLM 0.32.
    body = {"model": name, "prompt": list(ids), "max_tokens": 1, "temperature": temperature, "logprobs": TOP_LOGPS}
    answer = await client.ask("/v1/completions", body | {"return_tokens_as_token_ids": True}, seconds=None)
    return sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:TOP_LOGPS]
