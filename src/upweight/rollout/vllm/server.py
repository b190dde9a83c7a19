"""Completions from a vLLM server that receives new weights; see `types.Generator`."""

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from upweight.errors import UserError
from upweight.heartbeat import progressed
from upweight.models.modules import unwrap_peft
from upweight.models.processor import image_reader
from upweight.models.tokenizer import eos_token_ids
from upweight.rollout.sampling_params import completion_fields
from upweight.rollout.vllm.client import RequestFailed, RequestRefused, Retry, VllmClient, unreachable
from upweight.rollout.vllm.direct_transfer import FOLDER, direct_transport
from upweight.rollout.vllm.file_transfer import transport_for
from upweight.rollout.vllm.image_probe import image_probe
from upweight.rollout.vllm.images import ImagePrompts
from upweight.rollout.vllm.probe import check_vocabulary, served_base
from upweight.rollout.vllm.served_routes import ServedRoutes
from upweight.rollout.vllm.token_route import GENERATE, choices_of, explained, token_request
from upweight.rollout.vllm.versions import OnModel, ServedVersions
from upweight.types import Completion, Completions, Done, ImageRef, Prompts, Sampling

T = TypeVar("T")
IN_FLIGHT = 512  # requests at a time; each has all completions of its prompt
STALLED_SECONDS = 120.0  # least seconds without a token after which a server counts as hanging
CHECK_SECONDS = 5.0  # seconds between checks


class VllmServer:
    """Samples from one server, which has to read the weights in `folder` under the same path."""

    # Only one process uses it. Completions carry the version that their request began with.

    def __init__(
        self,
        url: str,
        model: PreTrainedModel | PeftModel,
        tokenizer: Any,
        *,
        dtype: torch.dtype,
        folder: Path,
        timeout: float = 240.0,
        lora_sync: bool | None = None,
        transfer: str = FOLDER,
        temperature: float = 1.0,
        options: Mapping[str, Any] | None = None,
        on_model: OnModel | None = None,
        probes_images: bool = False,
        routes: ServedRoutes | None = None,
    ) -> None:
        """Wait for the server up to `timeout` seconds and check that it serves the model.

        `options`: further fields of every request, such as `structured_outputs`.
        `transfer`: how all weights are sent, as in `trl.vllm_weight_transfer`.
        `on_model`: calls a function with the policy, on all ranks where its weights are sharded.
        `probes_images`: whether server and trainer are also compared after an image.
        `routes`: reads the experts that the server chose, where they are replayed.
        """
        config = unwrap_peft(model).config
        self.options, self._ends = dict(options or {}), sorted(eos_token_ids(unwrap_peft(model), tokenizer))
        reader = image_reader(tokenizer)
        self._images = None if reader is None else ImagePrompts(reader)
        self._routes = routes
        self._finished = self._calls = 0  # requests that have ended; calls that are running
        self._watcher: asyncio.Task[None] | None = None  # one for all calls
        self.client = client = VllmClient(url, timeout)

        async def connect() -> tuple[str, int | None]:
            name, longest = await served_base(client, config.name_or_path)
            await check_vocabulary(client, name, config.get_text_config().vocab_size)
            return name, longest

        name, self._longest = client.run(client.retry_until_answered(connect))
        self.weights = ServedVersions(
            client,
            model,
            direct_transport(transfer, transport_for(model, lora_sync, dtype, name)),
            dtype=dtype,
            folder=folder.resolve(),
            temperature=temperature,
            on_model=on_model,
            image_probe=image_probe(self._images if probes_images else None, temperature, self._longest),
        )
        self.weights.check_base(name)

    def generate(self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None) -> Completions:
        if not prompts:
            return []
        self.require_room(max(map(len, prompts)), sampling.max_new_tokens)
        arrived: queue.SimpleQueue[tuple[int, list[Completion]] | None] = queue.SimpleQueue()
        work = self.client.start(self._complete_all(prompts, count, sampling, arrived.put))
        work.add_done_callback(lambda _: arrived.put(None))
        try:
            while (ended := arrived.get()) is not None:
                progressed()
                if done is not None:
                    done(*ended)
            return work.result()
        finally:
            work.cancel()

    def on_model(self, call: OnModel) -> None:
        """Have `call` run functions on the policy from now on, where its weights are sharded over ranks."""
        self.weights.on_model = call

    def start(self, prompt: Sequence[int], count: int, sampling: Sampling) -> "Future[list[Completion]]":
        """Start the completions of one prompt, concurrently with other requests."""
        self.require_room(len(prompt), sampling.max_new_tokens)

        async def first() -> list[Completion]:
            return (await self._complete_all([prompt], count, sampling, lambda _: None))[0]

        return self.client.start(first())

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return self._images is not None

    def served_name(self) -> str | None:
        """Return the policy's name on the server; None where each version has a different name."""
        return None if self.weights.current is None or not self.weights.transport.drains else self.weights.current.name

    def sync(self, version: int) -> None:
        """Send the policy's present weights as `version`; return when the server samples from them."""
        if self.version() != version:
            self.weights.publish(version)

    def version(self) -> int:
        return -1 if self.weights.current is None else self.weights.current.version

    def health(self) -> str | None:
        """Return None when the server is healthy, else the problem."""
        try:
            self.client.run(self.client.ask("/health"))
        except (RequestFailed, RequestRefused) as error:
            return f"the vLLM server at {self.client.url}: {error}"
        return None

    def require_room(self, prompt: int, new: int) -> None:
        if self._longest is not None and prompt + new > self._longest:
            raise UserError(
                f"a prompt of {prompt} tokens with {new} new ones exceeds the {self._longest} that the server at "
                f"{self.client.url} takes: raise vllm.max_model_len, or shorten prompts or completions"
            )

    def close(self) -> None:
        self.weights.close()

    async def _complete_all(
        self, prompts: Prompts, count: int, sampling: Sampling, arrived: Callable[[tuple[int, list[Completion]]], None]
    ) -> list[list[Completion]]:
        """Return the completions of every prompt, many requests at a time; the first failure cancels the rest."""
        body = completion_fields(count, sampling, self._ends) | {"return_token_ids": True} | self.options
        if self._images is not None:
            body = self._images.without_image_token(body)
        limit = asyncio.Semaphore(IN_FLIGHT)
        await self.weights.ensure_served(None)

        async def complete(index: int) -> list[Completion]:
            async with limit:
                refs = sampling.images[index] if sampling.images else ()
                completions = await self._complete_prompt(prompts[index], body, refs)
            self._finished += 1
            arrived((index, completions))
            return completions

        work = [asyncio.ensure_future(complete(index)) for index in range(len(prompts))]
        watcher = self._watcher = self._watcher or asyncio.ensure_future(self._watch_progress())
        pending, self._calls = {*work}, self._calls + 1
        try:
            while pending:
                ended, _ = await asyncio.wait({*pending, watcher}, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
                pending -= ended
            return [task.result() for task in work]
        finally:
            self._calls -= 1
            if self._watcher is not None and (self._watcher.done() or not self._calls):
                self._watcher.cancel()
                self._watcher = None
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _complete_prompt(
        self, prompt: Sequence[int], body: dict[str, Any], refs: Sequence[ImageRef] = ()
    ) -> list[Completion]:
        images = self._images if refs else None
        by_tokens = images is not None or self._routes is not None

        def read(answer: Any, version: int) -> list[Completion]:
            if images is not None:
                choices = images.choices(answer, prompt)
            else:
                choices = choices_of(answer) if by_tokens else answer["choices"]
            completions = completions_of(choices, prompt, body["n"], version, self._routes)
            known = self.weights.reports_sampler_logps
            return completions if known else [replace(completion, logps=[]) for completion in completions]

        if by_tokens:
            sent = token_request(prompt, body) if images is None else await images.body(prompt, refs, body)
            try:
                return await self.request(GENERATE, sent, read)
            except RequestRefused as error:
                what = "prompts with images" if images is not None else "requests for the experts of tokens"
                raise explained(error, self.client.url, what) from None
        try:
            return await self.request("/v1/completions", {**body, "prompt": list(prompt)}, read)
        except RequestRefused as error:
            raise UserError(f"the vLLM server at {self.client.url} refuses a request: {error}") from None

    async def request(self, path: str, body: Mapping[str, Any], read: Callable[[Any, int], T]) -> T:
        """Send a request to the policy, with retries up to the time limit; return `read(answer, version)`."""
        # It is called on the client's event loop.
        retry: Retry | None = None
        while True:
            served = await self.weights.acquire()
            try:
                answer = await self.client.ask(path, {**body, "model": served.name}, seconds=None)
                return read(answer, served.version)
            except (RequestFailed, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.status != 404:  # 404: the server lost the adapter
                    raise
                problem = error
            finally:
                self.weights.release(served)
            retry = retry or Retry(self.client)
            await retry.wait_or_raise(problem)
            await self.weights.ensure_served(retry.since)

    async def _watch_progress(self) -> None:
        """Raise when requests are running and no token is generated for too long."""
        clock = asyncio.get_running_loop().time
        timeout = max(self.client.timeout, STALLED_SECONDS)
        seen, since = None, clock()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            limit, problem = timeout, "it answers, but writes no tokens"
            try:
                identity = await self.client.identity()
                state = (self._finished, identity)
                if identity.tokens is None:  # only finished requests show progress
                    limit *= 10
            except RequestFailed as error:
                state, problem = seen, str(error)
            if state != seen or self.weights.is_loading:
                seen, since = state, clock()
            elif clock() - since > limit:
                raise UserError(unreachable(self.client.url, limit, problem))


def completions_of(
    choices: Sequence[Any], prompt: Sequence[int], count: int, version: int, served_routes: ServedRoutes | None = None
) -> list[Completion]:
    """Return the completions in the choices of an answer, in the order of their index."""
    choices = sorted(choices, key=lambda choice: choice["index"])
    if len(choices) != count or any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
        ends = {choice["finish_reason"] for choice in choices}
        raise RequestFailed(f"{len(choices)} of {count} completions came back, ended by {', '.join(map(str, ends))}")
    completions = []
    for choice in choices:
        ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if choice["prompt_token_ids"] != list(prompt) or len(ids) != len(logps):
            raise UserError("the vLLM server did not continue the tokens that it was sent; use vLLM 0.26 or later")
        routes = None
        if served_routes is not None:
            routes = served_routes.read(choice.get("routed_experts"), len(prompt) + len(ids))
        finished = choice["finish_reason"] == "stop"
        completions.append(Completion(ids, logps, [version] * len(ids), finished, routes=routes))
    return completions
