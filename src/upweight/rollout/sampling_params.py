"""The sampling parameters of a config, and the fields of vLLM requests for them."""

from collections.abc import Iterable
from typing import Any

from upweight.config.generation_options import ALWAYS_ON, FIELDS, SPELLINGS, read_options
from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError
from upweight.types import Sampling


def build_sampling(section: RolloutSection, max_new_tokens: int) -> Sampling:
    """Return the sampling parameters; `generation_kwargs` override the other keys."""
    options, errors = read_options(section.generation_args, others=section.use_vllm)
    if errors:
        raise UserError("\n".join(errors))
    keys = {name: value for name in FIELDS if (value := getattr(section, name, None)) is not None}
    return Sampling(**{"max_new_tokens": max_new_tokens, **keys, **options})


def request_options(section: RolloutSection) -> dict[str, Any]:
    """Return further fields of requests to vLLM: structured outputs, and options that only vLLM has."""
    given = section.generation_args
    options = {key: given[key] for key in given if key not in ALWAYS_ON and SPELLINGS.get(key, key) not in FIELDS}
    if section.regex is not None:
        options["structured_outputs"] = {"regex": section.regex}
    return options


def sampling_fields(sampling: Sampling, ends: Iterable[int] = ()) -> dict[str, Any]:
    """Return sampling parameters as fields of a vLLM request; all are set, so that no default of vLLM applies."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sorted({*ends, *sampling.stop_ids}),
        "stop": list(sampling.stop_strings),
    }


def completion_fields(count: int, sampling: Sampling, ends: Iterable[int] = ()) -> dict[str, Any]:
    """Return the fields of a request for `count` completions with the log-probs of the sampled tokens."""
    return sampling_fields(sampling, ends) | {"n": count, "logprobs": 0, "skip_special_tokens": False}
