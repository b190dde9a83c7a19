"""Checks that a server serves the model that is trained: its name, its vocabulary, its log-probs."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from upweight.engine.forward import base_of
from upweight.errors import UserError
from upweight.models.modules import dropout_off
from upweight.rollout.sampling_params import completion_fields
from upweight.rollout.vllm.client import RequestRefused, VllmClient
from upweight.types import Sampling

TOP_LOGPS = 5  # most likely tokens that are compared
LENGTH, PROMPT = 24, 8  # tokens of a probe, and how many of them are given
FLOAT32_LIMIT = 1e-3  # largest difference in float32; kernels differ by 5e-5
# Mean difference in half precision: a bfloat16 server differs by 0.05 from itself, another model by 1 and more.
MEAN_LIMIT = 0.25


async def served_base(client: VllmClient, model_name: str | None) -> tuple[str, int | None]:
    """The name that the server has for the model that is trained, and its longest sequence."""
    entries = (await client.ask("/v1/models"))["data"]
    bases = [entry for entry in entries if entry.get("parent") is None]
    for entry in bases:
        if any(same_model(model_name or "", str(entry.get(key) or "")) for key in ("id", "root")):
            return entry["id"], entry.get("max_model_len")
    names = ", ".join(repr(entry["id"]) for entry in bases)
    raise UserError(
        f"the server at {client.url} serves {names}, but base_model is {model_name!r}. Serve that, or fix the address."
    )


def same_model(one: str, other: str) -> bool:
    """Whether two names mean one model: alike, one folder, or one last name (a hub id and where it was stored)."""
    if not one or not other:
        return False
    if Path(one).is_dir() and Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    return _last_name(one) == _last_name(other)


def _last_name(name: str) -> str:
    stored = re.search(r"models--[^/]+--([^/]+)/snapshots/", name)
    return (stored[1] if stored else name.rstrip("/").rpartition("/")[2]).lower()


async def check_vocabulary(client: VllmClient, name: str, size: int) -> None:
    """Refuse a server that knows fewer or more tokens than the model, by which biases it takes.

    Not by a prompt of such a token: where the tokenizer has it and the model does not, vLLM lets it in, and dies.
    """
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
    """Tokens of a vocabulary for others to be written after."""
    return np.random.default_rng(7).integers(0, size, PROMPT).tolist()


def probe_fields(temperature: float) -> dict[str, Any]:
    """How what follows them is asked for, in vLLM's words."""
    return completion_fields(1, Sampling(LENGTH - PROMPT, temperature)) | {"ignore_eos": True}


async def ask_probe(client: VllmClient, name: str, size: int, temperature: float) -> tuple[list[int], list[float]]:
    """A few given tokens with those that the server writes after them, and the log-probs it reports of the latter."""
    prompt = probe_prompt(size)
    body = probe_fields(temperature) | {"model": name, "prompt": prompt, "return_token_ids": True}
    choice = (await client.ask("/v1/completions", body, seconds=None))["choices"][0]
    if choice.get("token_ids") is None or choice.get("logprobs") is None:
        raise UserError(f"the server at {client.url} does not return token ids and log-probs; use vLLM 0.26 or later.")
    return [*prompt, *choice["token_ids"]], choice["logprobs"]["token_logprobs"]


def difference(
    model: nn.Module, ids: Sequence[int], reported_logps: Sequence[float], temperature: float, *, adapted: bool
) -> tuple[float, float]:
    """Mean and largest difference of the server's log-probs from those of the model, with or without its adapter."""
    base = base_of(model)
    if max(ids) >= base.config.get_text_config().vocab_size or len(reported_logps) != len(ids) - PROMPT:
        return float("inf"), float("inf")
    off: Any = contextlib.nullcontext()
    if isinstance(model, PeftModel) and not adapted:
        off = model.disable_adapter()
    with torch.no_grad(), dropout_off(model), off:
        ids_1T = torch.tensor([list(ids)], device=base.device)
        logits_NV = model(input_ids=ids_1T, use_cache=False).logits[0, PROMPT - 1 : -1].float() / temperature
        trainer_logps = logits_NV.log_softmax(-1).gather(1, ids_1T[0, PROMPT:, None])[:, 0].cpu()
    apart = (trainer_logps - torch.tensor(reported_logps)).abs()
    return float(apart.mean()), float(apart.max())


def agrees(mean: float, largest: float, *, exact: bool) -> bool:
    """Whether server and trainer hold the same weights; `exact` where both compute in float32. NaN never agrees."""
    return largest <= FLOAT32_LIMIT if exact else mean <= MEAN_LIMIT


async def applies_temperature(client: VllmClient, name: str, size: int) -> bool:
    """Whether a server reports log-probs at the sampling temperature: a low one widens their spread then."""
    plain, sharp = [await top_logps_of(client, name, probe_prompt(size), temperature) for temperature in (1.0, 0.25)]
    return sharp[0] - sharp[-1] >= 2 * (plain[0] - plain[-1])


async def top_logps_of(client: VllmClient, name: str, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The log-probs of the most likely tokens after given ones, best first: the same whenever weights are the same.

    Not by `prompt_logprobs`: asked of an adapter while other requests are under way, they bring vLLM 0.32 down.
    """
    body = {"model": name, "prompt": list(ids), "max_tokens": 1, "temperature": temperature, "logprobs": TOP_LOGPS}
    answer = await client.ask("/v1/completions", body | {"return_tokens_as_token_ids": True}, seconds=None)
    return sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:TOP_LOGPS]
