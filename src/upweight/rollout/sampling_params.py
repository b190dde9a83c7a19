"""The sampling that a config asks for, also in vLLM's words."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from upweight.config.sections.rollout import RolloutSection
from upweight.errors import UserError, did_you_mean
from upweight.types import Sampling

# What other programs call a field of Sampling.
SPELLINGS = {
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "stop": "stop_strings",
    "stop_token_ids": "stop_ids",
    "eos_token_id": "stop_ids",
}
SAMPLED = ("do_sample",)  # completions of a group must differ: sampling is always on
FIELDS = {
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "stop_ids": int,
    "stop_strings": str,
}


def sampling_of(section: RolloutSection, max_new_tokens: int) -> Sampling:
    """How completions are drawn; `generation_kwargs` has the last word."""
    plain = Sampling(
        max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p or 0.0,
        repetition_penalty=section.repetition_penalty,
    )
    return Sampling(**{**vars(plain), **_options(section.generation_args, others=section.use_vllm)})


def request_options(section: RolloutSection) -> dict[str, Any]:
    """Fields of requests to a vLLM server beyond the sampling: structured outputs, and what only vLLM knows."""
    given = {key: value for key, value in section.generation_args.items() if key not in SAMPLED}
    options = {key: value for key, value in given.items() if SPELLINGS.get(key, key) not in FIELDS}
    if section.regex is not None:
        options["structured_outputs"] = {"regex": section.regex}
    return options


def sampling_fields(sampling: Sampling, ends: Iterable[int] = ()) -> dict[str, Any]:
    """How to sample, in vLLM's words; nothing is left to its defaults."""
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
    """The same for so many completions, with the log-probs of what is sampled."""
    return sampling_fields(sampling, ends) | {"n": count, "logprobs": 0, "skip_special_tokens": False}


def _options(given: Mapping[str, Any], *, others: bool) -> dict[str, Any]:
    """Sampling options by our names; an unknown one is an error unless `others` are somebody else's matter."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = SPELLINGS.get(key, key)
        if key in SAMPLED and value is True:
            continue
        if key in SAMPLED:
            raise UserError(f"trl.generation_kwargs: {key}: false makes all completions of a group alike: drop it.")
        if name not in FIELDS and others:
            continue
        if name not in FIELDS:
            known = [*FIELDS, *SPELLINGS]
            raise UserError(
                f"trl.generation_kwargs: '{key}' is not an option of the in-process sampler."
                f"{did_you_mean(key, known)} It knows {', '.join(known)}."
            )
        found[name] = _value(key, name, value)
    return found


def _value(key: str, name: str, value: Any) -> Any:
    kind = FIELDS[name]
    many = name in ("stop_ids", "stop_strings")
    values = value if many and isinstance(value, list | tuple) else [value]
    wanted = (int, float) if kind is float else kind
    if any(not isinstance(one, wanted) or isinstance(one, bool) for one in values):
        raise UserError(f"trl.generation_kwargs: '{key}' must be {kind.__name__}{' or a list' if many else ''}.")
    if name in RolloutSection.model_fields:
        try:
            RolloutSection(**{name: values[0]})  # holds to the limits of the key of that name
        except ValidationError as error:
            raise UserError(f"trl.generation_kwargs: '{key}': {error.errors()[0]['msg']}, got {value}.") from error
    return tuple(values) if many else kind(values[0])
