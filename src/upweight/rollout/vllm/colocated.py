"""Completions from a vLLM engine in this process, which sleeps during training; see `types.Generator`."""

import contextlib
import gc
import importlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.log import warn_once
from upweight.models.modules import unwrap_peft
from upweight.models.processor import image_reader
from upweight.models.tokenizer import eos_token_ids
from upweight.rollout.sampling_params import completion_fields
from upweight.rollout.vllm.file_transfer import AdapterTransport, ServedVersion, transport_for, write_aside
from upweight.rollout.vllm.image_probe import image_probe
from upweight.rollout.vllm.images import ImagePrompts
from upweight.rollout.vllm.probe import agrees, difference, probe_fields, probe_prompt
from upweight.rollout.vllm.served_routes import ServedRoutes
from upweight.rollout.vllm.server import completions_of
from upweight.serve.command import allowed_rank
from upweight.types import Completions, Done, Prompts, Sampling


class VllmColocated:
    """An engine on the trainer's GPU. A sync writes new weights, which the engine loads before it samples next."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: Any,
        *,
        dtype: torch.dtype,
        folder: Path,
        longest: int,
        memory: float = 0.3,
        parallel: int = 1,
        sleeps: bool = True,
        lora_sync: bool | None = None,
        temperature: float = 1.0,
        options: Mapping[str, Any] | None = None,
        probes_images: bool = False,
        routes: ServedRoutes | None = None,
    ) -> None:
        """`longest` limits the tokens of a prompt and its completion; `memory` is the share of the GPU while awake.

        `probes_images`: whether engine and trainer are also compared after an image.
        `routes`: reads the experts that the engine chose, where they are replayed.
        """
        base = unwrap_peft(model)
        name = str(base.config.name_or_path)
        self._model, self._dtype, self._temperature = model, dtype, temperature
        self._folder, self._longest, self._run = folder.resolve(), longest, uuid.uuid4().hex[:8]
        self._options, self._ends = dict(options or {}), eos_token_ids(base, tokenizer)
        self._transport = transport_for(model, lora_sync, dtype, name)
        reader = image_reader(tokenizer)
        self._images = None if reader is None else ImagePrompts(reader)
        self._image_probe = image_probe(self._images if probes_images else None, temperature, longest)
        self._routes = routes
        on_gpu = torch.cuda.is_available()
        self._sleeps = sleeps and on_gpu
        self._settings: dict[str, Any] = {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "gpu_memory_utilization": memory,
            "max_model_len": longest,
            "tensor_parallel_size": parallel,
            "enable_sleep_mode": self._sleeps,
            "enforce_eager": not on_gpu,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as training has them
            "generation_config": "vllm",  # ignore the model's own sampling defaults
        }
        if routes is not None:
            self._settings["enable_return_routed_experts"] = True
        if isinstance(self._transport, AdapterTransport):
            assert isinstance(model, PeftModel)
            config: Any = model.peft_config[model.active_adapters[0]]
            rank = max([int(config.r), *map(int, (config.rank_pattern or {}).values())])
            loras = {"enable_lora": True, "max_lora_rank": allowed_rank(rank), "max_loras": 1, "max_cpu_loras": 2}
            self._settings |= loras
        self._llm: Any = None
        self._now: ServedVersion | None = None  # loaded by the engine
        self._next: ServedVersion | None = None  # written, and not yet loaded
        self._adapters = 0
        self._adapter: Any = None
        self._start_engine()

    def generate(self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None) -> Completions:
        if not prompts:
            return []
        self.require_room(max(map(len, prompts)), sampling.max_new_tokens)
        with self._engine_awake():
            if self._next is not None:
                self._load_weights(self._next)
            if self._now is None:
                raise UserError("vLLM was sent no weights yet")
            fields = completion_fields(count, sampling, self._ends) | self._options
            if self._images is not None:
                fields = self._images.without_image_token(fields)
            answers = self._ask(self._requests(prompts, sampling), prompts, fields)
        completions_by_prompt = [
            completions_of(choices, prompt, count, self._now.version, self._routes)
            for choices, prompt in zip(answers, prompts, strict=True)
        ]
        if done is not None:
            for index, completions in enumerate(completions_by_prompt):
                done(index, completions)
        return completions_by_prompt

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return self._images is not None

    def sync(self, version: int) -> None:
        """Write the policy's present weights as `version`, for the next call."""
        if self.version() == version:
            return
        self._remove_version(self._next)
        folder = self._folder / f"{self._run}-v{version}"
        write_aside(lambda part: self._transport.writer(part)(self._model), folder)
        self._next = ServedVersion(self._transport.name(folder), version, folder)

    def version(self) -> int:
        served = self._next or self._now
        return -1 if served is None else served.version

    def require_room(self, prompt: int, new: int) -> None:
        if prompt + new > self._longest:
            problem = f"a prompt of {prompt} tokens with {new} new ones exceeds the {self._longest} of colocated vLLM"
            raise UserError(f"{problem}: raise trl.vllm_max_model_length, or shorten prompts or completions")

    def close(self) -> None:
        self._remove_version(self._now)
        self._remove_version(self._next)
        self._now = self._next = self._adapter = self._llm = None
        gc.collect()
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _start_engine(self) -> Any:
        if self._llm is None:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # its INFO lines would double the log of a run
            os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
            try:
                vllm = importlib.import_module("vllm")
            except ImportError as error:
                raise UserError(
                    f"trl.vllm_mode: colocate needs vLLM in this Python environment ({error}); install it, use a "
                    "server ('vllm_mode: server'), or drop 'use_vllm'."
                ) from None
            _free_cached_memory()
            self._llm = vllm.LLM(**self._settings)
            if self._sleeps:
                self._llm.sleep(level=1)
        return self._llm

    @contextlib.contextmanager
    def _engine_awake(self) -> Iterator[None]:
        engine = self._start_engine()
        if self._sleeps:
            _free_cached_memory()
            engine.wake_up()
        try:
            yield
        finally:
            if self._sleeps:
                engine.sleep(level=1)

    def _load_weights(self, served: ServedVersion) -> None:
        """Load new weights into the engine and check that they are the policy's."""
        previous = self._adapter
        if isinstance(self._transport, AdapterTransport):
            self._adapters += 1
            vllm_lora = importlib.import_module("vllm.lora.request")
            self._adapter = vllm_lora.LoRARequest(served.name, self._adapters, str(served.folder))
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(served.folder)})
            self._llm.reset_prefix_cache()  # it was computed with the old weights
            if self._images is not None:
                self._llm.llm_engine.reset_encoder_cache()  # features of images
        self._check_weights()
        if previous is not None:
            self._llm.llm_engine.remove_lora(previous.lora_int_id)
        self._remove_version(self._now)
        self._now, self._next = served, None

    def _check_weights(self) -> None:
        """Compare the log-probs of engine and trainer on a few tokens."""
        size = unwrap_peft(self._model).config.get_text_config().vocab_size
        prompt = probe_prompt(size)
        exact = self._dtype == torch.float32
        request = {"prompt_token_ids": prompt}
        ids, reported_logps = self._continued(request, prompt, probe_fields(self._temperature))
        mean, largest = difference(self._model, ids, reported_logps, self._temperature, adapted=True)
        what, agreed, probe = "log-probs of vLLM", agrees(mean, largest, exact=exact), self._image_probe
        if agreed and probe is not None:
            answer = self._continued(probe.request, probe.prompt, probe.fields)
            mean, largest = probe.comparison(*answer, self._temperature, adapted=True)(self._model)
            what, agreed = f"{what} after an image", probe.agrees(mean, largest, exact=exact)
        if agreed:
            return
        apart = f"{what} differ by {mean:.3g} on average from the trainer's after new weights were loaded"
        if not getattr(unwrap_peft(self._model), "is_quantized", False):
            raise UserError(f"{apart}. Sample from a server, or in process (drop 'use_vllm').")
        warn_once(f"{apart}: the base is quantised here")

    def _requests(self, prompts: Prompts, sampling: Sampling) -> list[dict[str, Any]]:
        """Return the prompts as the engine takes them, each with its images."""
        shown = sampling.images or [()] * len(prompts)
        return [
            self._images.in_process(prompt, refs)
            if refs and self._images is not None
            else {"prompt_token_ids": list(prompt)}
            for prompt, refs in zip(prompts, shown, strict=True)
        ]

    def _continued(
        self, request: dict[str, Any], prompt: Sequence[int], fields: Mapping[str, Any]
    ) -> tuple[list[int], list[float]]:
        """Return a prompt with the tokens that the engine samples after it, and their log-probs."""
        choice = self._ask([request], [prompt], fields)[0][0]
        return [*prompt, *choice["token_ids"]], choice["logprobs"]["token_logprobs"]

    def _ask(
        self, requests: Sequence[dict[str, Any]], prompts: Prompts, fields: Mapping[str, Any]
    ) -> list[list[dict[str, Any]]]:
        """Return the choices for each prompt in the form of a server's."""
        vllm_params = importlib.import_module("vllm.sampling_params")
        fields = dict(fields)
        if "structured_outputs" in fields:
            fields["structured_outputs"] = vllm_params.StructuredOutputsParams(**fields["structured_outputs"])
        if bias := fields.get("logit_bias"):  # a server takes names, which JSON has
            fields["logit_bias"] = {int(token): value for token, value in bias.items()}
        params = vllm_params.SamplingParams(**fields)
        outputs = self._llm.generate(requests, params, use_tqdm=False, lora_request=self._adapter)
        for request, output, prompt in zip(requests, outputs, prompts, strict=True):
            if self._images is not None and "multi_modal_data" in request:
                self._images.require_same_tokens(output.prompt_token_ids, prompt)
        return [[_as_choice(output, request.prompt_token_ids) for output in request.outputs] for request in outputs]

    def _remove_version(self, served: ServedVersion | None) -> None:
        if served is not None:
            shutil.rmtree(served.folder, ignore_errors=True)


def _as_choice(output: Any, prompt: Sequence[int]) -> dict[str, Any]:
    ids = list(output.token_ids)
    logps = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
    return {
        "index": output.index,
        "finish_reason": output.finish_reason,
        "token_ids": ids,
        "logprobs": {"token_logprobs": logps},
        "prompt_token_ids": list(prompt),
        "routed_experts": getattr(output, "routed_experts", None),
    }


def _free_cached_memory() -> None:
    """Free the memory that torch caches, so that vLLM can use it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
