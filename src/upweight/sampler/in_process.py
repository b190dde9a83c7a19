"""Sampling with the weights in training: no second copy, no server, no sync."""

import functools
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from upweight.engine import Engine
from upweight.engine.routing import install_routing
from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.kernels.int8_weights import Int8Weights
from upweight.models.memory import free_memory, sampler_bytes
from upweight.models.modules import dropout_off, refuse_ruined_weights, replaced_forwards, unwrap_peft
from upweight.models.tokenizer import eos_token_ids
from upweight.sampler.check import CheckResult, TrialPrompts, compare_sampling
from upweight.sampler.collect import CompletionCollector, OnTokens, StopStrings
from upweight.sampler.cuda_graphs import GraphSteps
from upweight.sampler.decode import Decoder
from upweight.sampler.forward import CachedForward
from upweight.sampler.fused_decoder import products
from upweight.sampler.grid_sampler import GridSampler
from upweight.sampler.hf_generate import hf_generate
from upweight.sampler.slot_sampler import SlotSampler
from upweight.sampler.slots import Slots
from upweight.types import Completions, Done, Prompts, Sampling

Gather = Callable[[CheckResult], list[CheckResult]]  # returns the results of all ranks, on every rank
_PREFILL_TOKENS = 8192
_CACHE_ON_CPU = 4 << 30


class Strategy(StrEnum):
    """How completions are sampled, the fastest strategy first."""

    SHARED_PREFIX = "the sampler that shares prompts"
    GENERATE = "transformers' generate"
    GENERATE_UNCACHED = "transformers' generate without a cache"


class InProcess:
    """Completions from a model in this process, which may change between calls; see `types.Generator`."""

    # Each prompt is forwarded once for all its completions. On a GPU the steps are CUDA graphs, kept over calls. Before
    # the first call the sampling strategy is checked on the model, see `check_sampling`.

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        engine: Engine | None = None,
        end_ids: Collection[int] | None = None,
        device: torch.device | str | None = None,
        cache_bytes: int | None = None,
        prefill_tokens: int = _PREFILL_TOKENS,
        compile: bool = False,
        records: bool = False,
        reserved: int = 0,
        int8: bool = False,
    ) -> None:
        """`model`: the unwrapped model, or a PeftModel. `end_ids`: instead of the tokenizer's and the model's.

        `cache_bytes` limits the KV cache (more prompts are sampled in several waves); by default it is a share of the
        free memory on a GPU, less the bytes that are `reserved` for training. `compile` fuses the layers' kernels on a
        GPU, which takes some seconds at first.
        `records`: completions have the experts that routers chose, of a mixture that `install_routing` knows.
        `int8`: tokens are drawn with weights in 8 bits, of which there are copies until `close`.
        """
        self._model, self._base = model, unwrap_peft(model)
        self._tokenizer = tokenizer
        self._engine = engine or Engine(model)
        self._ends = frozenset(end_ids) if end_ids is not None else eos_token_ids(self._base, tokenizer)
        self._device = torch.device(device) if device is not None else self._base.device
        self._cache_bytes, self._reserved = cache_bytes, reserved
        self._version, self.compile = 0, compile and not records  # compiled layers would not record
        self._routing = install_routing(self._base) if records else None
        self._strategy = Strategy.GENERATE if self._engine.layout == "padded" else Strategy.SHARED_PREFIX
        self._checked: set[bool] = set()  # without images, with images
        forward = CachedForward(self._base, self._device, self._engine.images, self._routing)
        self._image_prompts, self._forward, self.int8 = forward.images, forward, int8
        self._sampler: SlotSampler | GridSampler = GridSampler(Decoder(forward), prefill_tokens)
        if self._device.type == "cuda":
            self._sampler = SlotSampler(GraphSteps(Slots(forward), self.compile), prefill_tokens)

    def generate(
        self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None, on_tokens: OnTokens = None
    ) -> Completions:
        """Return `count` completions for each prompt, in order; `done` is called for each prompt as it finishes.

        `on_tokens` is called with new tokens and the number of their completion: `prompt * count + member`.
        """
        self._check_request(prompts, count, sampling)
        if not prompts:
            return []
        self.check_sampling(prompts, sampling)
        sampling = self._suppressing(sampling)
        seed = sampling.seeds[0] if sampling.seeds else sampling.seed
        sampling = replace(sampling, seed=int(torch.randint(1 << 62, ())) if seed is None else seed)
        stops = StopStrings(self._tokenizer, sampling.stop_strings)
        ends, version = self._ends | set(sampling.stop_ids), self._version
        size = len(prompts), count, sampling.max_new_tokens
        given: dict[str, Any] = {"version": version, "done": done, "on_tokens": on_tokens}
        if self._routing is not None:
            given["route_shape"] = (self._routing.layers, self._routing.top_k)
        rows = CompletionCollector(*size, ends, stops, **given)
        with torch.no_grad(), dropout_off(self._model):
            return self._sample_with(self._strategy, self._engine, prompts, rows, sampling)

    def check_sampling(self, prompts: Prompts, sampling: Sampling, gather: Gather = lambda result: [result]) -> None:
        """Before the first call, sample a few tokens and choose the first strategy with the model's log-probs.

        `gather` returns the results of all ranks on every rank, where all ranks call this method.
        """
        has_images = any(sampling.images)
        if has_images in self._checked or not prompts:
            return
        sampling = self._suppressing(sampling)
        name = type(self._base).__name__
        strategies = list(Strategy)[list(Strategy).index(self._strategy) :]
        if has_images:  # without a cache `generate` would have to read images once for each token
            strategies = [one for one in strategies if one != Strategy.GENERATE_UNCACHED] or [Strategy.GENERATE]
        trial = TrialPrompts.of(prompts, sampling, self._max_positions())
        failures: list[str] = []
        for strategy in strategies:
            # Completions of full length, with the log-probs of the strategy.
            rows = CompletionCollector(len(trial.prompts), trial.count, trial.sampling.max_new_tokens)
            draw = functools.partial(self._sample_with, strategy, None, trial.prompts, rows, trial.sampling)
            with torch.no_grad(), dropout_off(self._model):
                check = compare_sampling(self._base, trial, draw, self._engine.images, rounded=self.int8)
                results = gather(check)
            # Of all ranks the same one, so that all choose the same strategy.
            result = next((result for result in results if not result.passed), results[0])
            if result.passed:
                break
            failures.append(f"{strategy} {result}")
        else:
            refuse_ruined_weights(self._base)
            raise UserError(
                f"{name} cannot be sampled in this process: {'; '.join(failures)}. Sample with vLLM "
                "(`trl.use_vllm: true`) where it knows the model, or train another one. A model whose rotary embedding "
                "changes beyond some length can be sampled up to that length: lower `trl.max_completion_length`."
            )
        if self.int8 and strategy != Strategy.SHARED_PREFIX:
            problem = "; ".join([*failures, f"{name} is sampled by {strategy}, which reads no weights in 8 bits"])
            raise UserError(f"trl.sampler_quantization: {problem}. Leave it out.")
        self._strategy = strategy
        self._checked.add(has_images)
        if failures:
            warn_once(f"{name}: {'; '.join(failures)}. Completions are sampled by {strategy}, which is slower")
        elif strategy != Strategy.SHARED_PREFIX:
            warn_once(
                f"{name} cannot share the keys and values of prompts: completions are sampled by {strategy}, "
                "prompts of one length at a time, which is slower"
            )

    @property
    def compile_seconds(self) -> float:
        """Return the seconds that compiling and recording have taken so far."""
        return self._sampler.compile_seconds

    @property
    def prefilled_tokens(self) -> int:
        """Return the tokens that were read before others were drawn, in all calls."""
        return self._sampler.prefilled_tokens

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return self._engine.images is not None

    @property
    def shares_prefixes(self) -> bool:
        """Return whether a prompt is forwarded once for all its completions."""
        return self._strategy == Strategy.SHARED_PREFIX

    def _sample_with(
        self,
        strategy: Strategy,
        engine: Engine | None,
        prompts: Prompts,
        rows: CompletionCollector,
        sampling: Sampling,
    ) -> Completions:
        """Sample completions by way of `rows`; with an engine, the log-probs of what `generate` samples are its."""
        if strategy == Strategy.SHARED_PREFIX and not self._ends_in_image(prompts, sampling):
            uniform_SN = _uniform_numbers(len(prompts), rows.count, sampling)
            prompts = self._image_prompts.keys(prompts, sampling.images)
            with self._few_rows_in_int8():
                self._sampler.sample(prompts, sampling, uniform_SN, rows, self._kv_memory())
        else:
            if self._routing is not None and engine is not None:
                problem = f"{type(self._base).__name__} is sampled by {Strategy.GENERATE}, which records no experts"
                raise UserError(f"trl.routing_replay: {problem}. Leave it out.")
            cached = strategy != Strategy.GENERATE_UNCACHED
            options: dict[str, Any] = {"cached": cached, "reader": self._engine.images}
            hf_generate(self._model, engine, prompts, rows, sampling, **options)
        return [rows.completions(prompt) for prompt in range(len(prompts))]

    def _few_rows_in_int8(self) -> AbstractContextManager[None]:
        """Let layers read weights in 8 bits for few rows inside, where that is asked for."""
        if not self.int8:
            return nullcontext()
        if self._forward.int8 is None:
            self._forward.int8 = Int8Weights(products(self._forward))
        self._forward.int8.refresh()
        return replaced_forwards(self._forward.int8.forwards())

    def _suppressing(self, sampling: Sampling) -> Sampling:
        """Return a sampling that never draws the token which stands for images: no features would belong to it."""
        reader = self._engine.images
        return sampling if reader is None else replace(sampling, suppress_ids=(reader.token_id,))

    def _ends_in_image(self, prompts: Prompts, sampling: Sampling) -> bool:
        """Return whether a prompt's last token, which the shared sampler feeds by its id, stands for an image."""
        each = zip(prompts, sampling.images, strict=True) if sampling.images else ()
        return any(prompt[-1] == refs[0].token_id for prompt, refs in each if refs)

    def sync(self, version: int) -> None:
        """Set the policy version of the following completions, and drop what was made of the weights before."""
        self._version = version
        self._sampler.forget()
        if self._forward.int8 is not None:
            self._forward.int8.forget()

    def version(self) -> int:
        """Return the policy version that the next request is sampled from."""
        return self._version

    def held_bytes(self) -> int:
        """Return the memory of caches that are kept between calls."""
        copies = self._forward.int8.bytes() if self._forward.int8 is not None else 0
        return self._sampler.bytes() + copies

    def close(self) -> None:
        """Free caches, graphs and copies of weights; the next call creates them again."""
        self._sampler.release()
        if self._forward.int8 is not None:
            self._forward.int8.release()

    def _check_request(self, prompts: Prompts, count: int, sampling: Sampling) -> None:
        """Raise for requests that cannot be sampled."""
        if count < 1 or sampling.max_new_tokens < 1:
            raise UserError(f"nothing to sample: {count} completions of {sampling.max_new_tokens} tokens")
        if empty := [number for number, prompt in enumerate(prompts) if len(prompt) == 0]:
            raise UserError(f"prompt {empty[0]} has no tokens: nothing to continue")
        if sampling.stop_strings and self._tokenizer is None:
            raise UserError("stop strings need a tokenizer")
        self.require_room(max((len(prompt) for prompt in prompts), default=0), sampling.max_new_tokens)

    def require_room(self, prompt: int, new: int) -> None:
        """Raise where a prompt of so many tokens with so many new ones exceeds the model's positions."""
        limit = self._max_positions()
        if limit and prompt + new > limit:
            raise UserError(
                f"a prompt of {prompt} tokens with {new} new ones exceeds the {limit} positions of the model: shorten "
                "the prompts (`max_prompt_length`) or the completions (`max_completion_length`)"
            )

    def _max_positions(self) -> int | None:
        limit = getattr(self._base.config.get_text_config(), "max_position_embeddings", None) or 0
        return limit if limit > 0 else None  # some say -1 where there is no limit

    def _kv_memory(self) -> int:
        """Return the bytes that keys and values may take."""
        if self._cache_bytes is not None:
            return self._cache_bytes
        if self._device.type != "cuda":
            return _CACHE_ON_CPU
        return sampler_bytes(free_memory(self._device) + self._sampler.bytes(), self._reserved)


def _uniform_numbers(prompts: int, count: int, sampling: Sampling) -> Tensor:
    """Return random numbers for each token of each completion."""
    length = sampling.max_new_tokens
    if sampling.seeds is not None:
        generators = [torch.Generator().manual_seed(number) for number in sampling.seeds]
        return torch.stack([torch.rand(length, generator=each, dtype=torch.float64) for each in generators])
    generator = torch.Generator().manual_seed(sampling.seed or 0)
    shape = (sampling.first + prompts, count, length)
    return torch.rand(shape, generator=generator, dtype=torch.float64)[sampling.first :].flatten(0, 1)
