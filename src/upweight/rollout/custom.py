"""Completions from a user's backend, or from a user's rollout function, which has one of two forms.

`f(model, processing_class, prompts, generation_config=None) -> list[str]` gets one dict with `messages` (or `prompt`)
for each completion and returns texts. `f(prompts, trainer) -> dict` gets the prompts of the data rows and returns
`prompt_ids`, `completion_ids`, `logprobs` (or None) and optionally `env_mask`; other lists become reward columns.

`trl.max_completion_length` applies to both: a longer text is cut, longer tokens are kept, neither counts as finished.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from upweight.data.images.records import image_refs, open_images
from upweight.data.raw_row import common_start
from upweight.environments.tools import opening_messages
from upweight.errors import UserError
from upweight.log import logger
from upweight.models.modules import dropout_off, unwrap_peft
from upweight.models.processor import image_reader
from upweight.models.tokenizer import eos_token_ids
from upweight.rollout.completion_source import CompletionSource
from upweight.sampler.hf_generate import generation_config
from upweight.types import Completion, Completions, Done, Generator, Group, GroupDone, Prompts, Sampling
from upweight.user_modules import named_errors

TOKEN_KEYS = ("prompt_ids", "completion_ids", "logprobs")
BACKEND_METHODS = ("generate", "require_room", "sync", "version", "close")
FORMS = (
    "Write it as f(model, processing_class, prompts, generation_config=None) -> list of texts, or as "
    "f(prompts, trainer) -> dict."
)


@dataclass
class CustomRollout(CompletionSource):
    """Fills groups by calling a user's function once for all of them, with each prompt repeated for its completions."""

    function: Callable[..., Any]
    name: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    trainer: Any = None  # passed to token functions; set once the trainer is built
    warned: bool = False  # about completions above the limit

    def __post_init__(self) -> None:
        self.returns_text = _returns_text(self.function, self.name)

    def __call__(self, groups: Sequence[Group], count: int, sampling: Sampling, done: GroupDone | None) -> None:
        each = [group for group in groups for _ in range(count)]
        with torch.no_grad(), dropout_off(self.model):
            completions = self._texts(each, sampling) if self.returns_text else self._tokens(groups, each, sampling)
        for index, group in enumerate(groups):
            group.completions = completions[index * count : (index + 1) * count]
            if done is not None:
                done(index)

    def _texts(self, each: Sequence[Group], sampling: Sampling) -> list[Completion]:
        prompts = []
        for group in each:
            columns = {name: value for name, value in group.row.items() if name != "prompt_ids"}
            if refs := image_refs(group.row):
                columns |= {"images": open_images(refs), "prompt": _prompt_with_images(group)}
            prompts.append({**columns, "messages": opening_messages(columns.get("prompt"))})
        torch.manual_seed(sampling.seed or 0)
        options = {}
        if "generation_config" in inspect.signature(self.function).parameters:
            ids = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
            options["generation_config"] = generation_config(sampling, *ids)
        reader = image_reader(self.tokenizer)
        processing = RolloutTokenizer(self.tokenizer if reader is None else reader.processor)
        texts = self._call_function(self.model, processing, prompts, **options)
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"trl.rollout_func: '{self.name}' must return a list of strings, got {_kind(texts)}.")
        if len(texts) != len(each):
            raise UserError(f"trl.rollout_func: '{self.name}' returned {len(texts)} texts for {len(each)} prompts.")
        return [self._from_text(text, sampling.max_new_tokens) for text in texts]

    def _from_text(self, text: str, limit: int) -> Completion:
        """Return a text as a completion: with an end token where the limit has room for it, else cut at the limit."""
        end: list[Any] = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        reader = image_reader(self.tokenizer)
        if reader is not None:  # the name of the token that stands for images, which a text may have
            ids = [token for token in ids if token != reader.token_id]
        if len(ids) + len(end) <= limit:
            return Completion([*ids, *end], [], [], finished=True, text=text)
        if len(ids) > limit:
            self._warn(len(ids), limit, "it is cut there")
            ids = ids[:limit]
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return Completion(ids, [], [], finished=False, text=text)

    def _warn(self, length: int, limit: int, fate: str) -> None:
        if not self.warned:
            self.warned = True
            logger.warning(
                "trl.rollout_func: '%s' wrote a completion of %d tokens, above trl.max_completion_length (%d): %s and "
                "counts as truncated. Raise the limit, or let the function heed it.", self.name, length, limit, fate
            )  # fmt: skip

    def _tokens(self, groups: Sequence[Group], each: Sequence[Group], sampling: Sampling) -> list[Completion]:
        returned = self._call_function([_prompt_with_images(group) for group in each], self.trainer)
        if not isinstance(returned, Mapping) or not {"prompt_ids", "completion_ids"} <= set(returned):
            keys = ", ".join(TOKEN_KEYS)
            raise UserError(f"trl.rollout_func: '{self.name}' must return a dict with {keys}, got {_kind(returned)}.")
        for key, values in returned.items():
            if values is not None and (count := len(values)) != len(each):
                raise UserError(f"trl.rollout_func: '{self.name}' returned {count} '{key}' for {len(each)} prompts.")
        extras = [key for key in returned if key not in (*TOKEN_KEYS, "env_mask") and returned[key] is not None]
        prompts = [[int(token) for token in ids] for ids in returned["prompt_ids"]]
        count = len(each) // len(groups)
        completions = []
        for index, group in enumerate(groups):
            numbers = range(index * count, (index + 1) * count)
            # Prompts of a group may differ, as where an environment's messages count as prompt.
            group.prompt_ids = common_start([prompts[number] for number in numbers])
            group.extras |= {key: [returned[key][number] for number in numbers] for key in extras}
            for number in numbers:
                self._check_images(group, number, [*prompts[number], *returned["completion_ids"][number]])
                prompt_rest = prompts[number][len(group.prompt_ids) :]
                completions.append(self._from_tokens(returned, number, prompt_rest, sampling.max_new_tokens))
        return completions

    def _check_images(self, group: Group, number: int, ids: Sequence[Any]) -> None:
        """Raise where the tokens of a completion and its prompt do not stand for the images of the row."""
        reader, refs = image_reader(self.tokenizer), image_refs(group.row)
        if reader is None:
            return
        wanted, given = sum(ref.tokens for ref in refs), sum(int(token) == reader.token_id for token in ids)
        if wanted != given:
            problem = f"{given} tokens stand for images, and the row's take {wanted}"
            remedy = "Get prompt_ids from the processor, and suppress its image token while sampling."
            raise UserError(f"trl.rollout_func: '{self.name}', completion {number}: {problem}. {remedy}")

    def _from_tokens(self, returned: Mapping[str, Any], number: int, prompt_rest: list[int], limit: int) -> Completion:
        """Return a completion as it was returned, after the part of its prompt that its group does not share."""
        ids = [int(token) for token in returned["completion_ids"][number]]
        logps, mask = returned.get("logprobs"), returned.get("env_mask")
        logps = [] if logps is None else [float(logp) for logp in logps[number]]
        sampled = None if mask is None else [bool(flag) for flag in mask[number]]
        for key, values in (("logprobs", logps or ids), ("env_mask", ids if sampled is None else sampled)):
            if len(values) != len(ids):
                wrong = f"{len(values)} '{key}' for {len(ids)} tokens"
                raise UserError(f"trl.rollout_func: '{self.name}', completion {number}: {wrong}.")
        sampled_tokens = len(ids) if sampled is None else sum(sampled)
        if sampled_tokens > limit:
            self._warn(sampled_tokens, limit, "it is kept whole")
        ends = eos_token_ids(unwrap_peft(self.model), self.tokenizer)
        ended = bool(ids) and ids[-1] in ends and sampled_tokens <= limit
        if prompt_rest:
            logps = [0.0] * len(prompt_rest) + logps if logps else []
            sampled = [False] * len(prompt_rest) + (sampled or [True] * len(ids))
        return Completion([*prompt_rest, *ids], logps, [], finished=ended, sampled=sampled, prompt_len=len(prompt_rest))

    def _call_function(self, *arguments: Any, **options: Any) -> Any:
        with named_errors(f"trl.rollout_func: '{self.name}' failed"):
            return self.function(*arguments, **options)


class CustomBackend:
    """Samples with an object of a user's class, and checks what it returns; see `types.Generator`."""

    def __init__(
        self, kind: Callable[..., Any], name: str, model: nn.Module, tokenizer: Any, options: Mapping[str, Any]
    ) -> None:
        self._key, self._model = f"trl.rollout_backend: '{name}'", model
        with named_errors(f"{self._key} cannot be built"):
            self._backend: Generator = kind(model, tokenizer, **options)
        missing = [method for method in BACKEND_METHODS if not callable(getattr(self._backend, method, None))]
        if missing:
            needed = f"It needs {', '.join(BACKEND_METHODS)} (types.Generator)."
            raise UserError(f"{self._key} has no {', '.join(missing)}. {needed}")

    def generate(self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None) -> Completions:
        reported: set[int] = set()

        def report(index: int, completions: list[Completion]) -> None:
            self._check_completions([completions], 1, count)
            reported.add(index)

            if done is not None:
                done(index, completions)

        with torch.no_grad(), dropout_off(self._model), named_errors(f"{self._key}: generate failed"):
            by_prompt = self._backend.generate(prompts, count, sampling, report)
            self._check_completions(by_prompt, len(prompts), count)
        for index, completions in enumerate(by_prompt):
            if index not in reported:
                report(index, completions)
        return by_prompt

    def _check_completions(self, by_prompt: Completions, prompts: int, count: int) -> None:
        sizes = [len(completions) for completions in by_prompt]
        if sizes != [count] * prompts:
            given = f"{sum(sizes)} completions of {len(sizes)} prompts"
            raise UserError(f"{self._key}: generate gave {given}, not {count} of each of {prompts}.")
        for one in (one for completions in by_prompt for one in completions):
            if not all(type(token) is int for token in one.ids) or len(one.logps) not in (0, len(one.ids)):
                problem = f"generate gave a completion with {len(one.logps)} logps for {len(one.ids)} ids"
                remedy = "Its ids are a list of ints, and its logps one float for each of them, or none."
                raise UserError(f"{self._key}: {problem}. {remedy}")

    def require_room(self, prompt: int, new: int) -> None:
        with named_errors(f"{self._key}: require_room failed"):
            self._backend.require_room(prompt, new)

    def sync(self, version: int) -> None:
        with torch.no_grad(), named_errors(f"{self._key}: sync failed"):
            self._backend.sync(version)

    def version(self) -> int:
        with named_errors(f"{self._key}: version failed"):
            return self._backend.version()

    def close(self) -> None:
        with named_errors(f"{self._key}: close failed"):
            self._backend.close()


class RolloutTokenizer:
    """A tokenizer whose `apply_chat_template` takes `processing_class` in place of `tokenize`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer  # or a processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tokenizer's method, with `processing_class` as another name of `tokenize`."""
        if "processing_class" in kwargs:
            kwargs["tokenize"] = bool(kwargs.pop("processing_class"))
        return self._tokenizer.apply_chat_template(*args, **kwargs)


def _prompt_with_images(group: Group) -> Any:
    """Return a prompt as functions get it: its image parts hold the images of the row."""
    prompt, refs = group.row.get("prompt"), image_refs(group.row)
    if not refs or not isinstance(prompt, list):
        return prompt
    images = iter(open_images(refs))

    def filled(part: Any) -> Any:
        bare = isinstance(part, Mapping) and part.get("type") == "image"
        return {**part, "image": next(images)} if bare else part

    return [
        {**message, "content": [filled(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def _returns_text(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has the form that returns text, by the names of its parameters, else by their number."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UserError(f"trl.rollout_func: '{name}' is no Python function. {FORMS}") from None
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in rest]
    if {"model", "processing_class", "prompts"} <= set(parameters) or len(needed) == 3:
        return True
    if {"prompts", "trainer"} <= set(parameters) or len(needed) == 2:
        return False
    raise UserError(f"trl.rollout_func: '{name}' takes ({', '.join(parameters)}). {FORMS}")


def _kind(value: Any) -> str:
    return f"keys {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
