"""The policy versions on a server: they are sent, verified, kept while in use, and sent again after a restart."""

import asyncio
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from upweight.errors import UserError
from upweight.log import logger, warn_once
from upweight.models.modules import unwrap_peft
from upweight.rollout.vllm.client import RequestFailed, RequestRefused, VllmClient, backoff
from upweight.rollout.vllm.file_transfer import ServedVersion, Transport, forget_leftovers, link_files, write_aside
from upweight.rollout.vllm.image_probe import ImageProbe
from upweight.rollout.vllm.probe import (
    agrees,
    applies_temperature,
    ask_probe,
    difference,
    served_base,
    top_logps_of,
)
from upweight.runs.command import resume_advice

SEND_ATTEMPTS = 4  # at sending weights
CHECK_VALID_SECONDS = 1.0  # seconds for which a check of the server stays valid: a restart takes longer
Sending = tuple[ServedVersion, "Future[tuple[list[int], list[float]]]"]  # with tokens and log-probs of its probe
OnModel = Callable[[Callable[[nn.Module], Any]], Any]
NO_TEMPERATURE = (
    "the server at %s reports log-probs without the temperature (%g), so the sampler's log-probs are unknown: old "
    "log-probs come from the trainer, and training does not correct for the difference between sampler and trainer, "
    "nor for the age of samples (importance sampling correction, off-policy mask). For that, add `--logprobs-mode "
    "processed_logprobs` to the server's command line (`upweight vllm-serve CONFIG --show` prints a whole one), or set "
    "'trl.temperature: 1.0'"
)


class ServedVersions:
    """The versions on one server. State is used on the client's thread only, weights on the caller's only."""

    def __init__(
        self,
        client: VllmClient,
        model: nn.Module,
        transport: Transport,
        *,
        dtype: torch.dtype,
        folder: Path,
        temperature: float,
        on_model: OnModel | None = None,
        image_probe: ImageProbe | None = None,
    ) -> None:
        """`on_model` calls a function with the policy; by default it is called directly with the model.

        `image_probe`: compares log-probs after an image too.
        """
        self.client, self.transport = client, transport
        self.current: ServedVersion | None = None
        self.open = asyncio.Event()  # clear while the weights under one name are replaced
        self._base = unwrap_peft(model)
        self.on_model: OnModel = on_model or (lambda work: work(model))
        self._dtype, self._folder, self._temperature = dtype, folder, temperature
        self._logps_temperature = temperature  # that the server's log-probs are reported at: 1 where it leaves it out
        self._vocabulary: int = self._base.config.get_text_config().vocab_size
        self._quantised = bool(getattr(self._base, "is_quantized", False))
        self._run = uuid.uuid4().hex[:8]
        self._old: list[ServedVersion] = []
        self._fault: str | None = None
        self._exact: bool | None = None  # whether server and trainer agree to the last digits, as in float32
        self._image_probe = image_probe
        self._restoring = asyncio.Lock()
        self._healthy_at = -CHECK_VALID_SECONDS  # when the server last had the current version
        self._drops: set[asyncio.Task[None]] = set()

    def check_base(self, name: str) -> None:
        """Check the server's temperature, and its log-probs against the trainer's where it keeps its base weights."""
        self.client.run(self.client.retry_until_answered(partial(forget_leftovers, self.client, self._folder)))
        self.client.run(self.client.retry_until_answered(partial(self._detect_temperature, name)))
        image_probe, with_image = self._image_probe, None
        if image_probe is not None:  # a server that reads no images is to be known before the first rollout
            with_image = self.client.run(self.client.retry_until_answered(partial(image_probe.ask, self.client, name)))
        if self.transport.drains:
            return
        probe = partial(ask_probe, self.client, name, self._vocabulary, self._temperature)
        ids, logps = self.client.run(self.client.retry_until_answered(probe))
        mean, largest = self.on_model(self._logp_comparison(ids, logps, adapted=False))
        if not self._within_limit(mean, largest):
            raise UserError(self._other_weights(mean))
        if (mean := self._apart_after_image(with_image, adapted=False)) is not None:
            raise UserError(self._other_weights(mean, after=", or prepares images in another way: after one"))

    @property
    def reports_sampler_logps(self) -> bool:
        """Whether the server's log-probs are those of the distribution that it samples from."""
        return self._logps_temperature == self._temperature

    def send(self, version: int, like: Path | None = None, attempt: int = 0) -> Sending:
        """Write the present weights, or link those of the folder `like`, and start their transfer."""
        folder = self._folder / f"{self._run}-v{version}{f'-{attempt}' if attempt else ''}"
        served = ServedVersion(self.transport.name(folder), version, folder)
        if like is None or not self.transport.keeps:
            write_aside(lambda part: self.on_model(self.transport.writer(part)), folder)
        else:
            write_aside(partial(link_files, like), folder)
        return served, self.client.start(self._load_weights(served))

    def publish(self, version: int, sending: Sending | None = None) -> ServedVersion:
        """Send the present weights until the server samples from them; `sending`: what `send` returned, if called."""
        problem: Exception | None = None
        for attempt in range(SEND_ATTEMPTS):
            if attempt:
                logger.warning("warning: sending the weights of step %d again: %s", version, problem)
                time.sleep(backoff(attempt + 1))
            served = None
            try:
                served, put = sending or self.send(version, attempt=attempt)
                sending = None
                mean, largest = self.on_model(self._logp_comparison(*put.result(), adapted=True))
                if not self._within_limit(mean, largest):
                    raise RequestFailed(f"log-probs after the sync differ by {mean:.3g} on average from the trainer's")
                if (mean := self._apart_after_image(served.with_image, adapted=True)) is not None:
                    apart = f"log-probs after an image differ by {mean:.3g} on average from the trainer's"
                    raise RequestFailed(f"{apart}, those after text do not: another vision tower or processor")
                self.client.run(self._make_current(served))
                return served
            except (OSError, SafetensorError, RequestFailed, RequestRefused) as error:
                problem, sending = error, None
                if served is not None:
                    self.client.run(self._drop_version(served))
            except BaseException as error:  # requests wait for these weights, whatever the error
                self.give_up(str(error) or type(error).__name__)
                raise
        fault = (
            f"the weights of step {version} could not be sent to the vLLM server at {self.client.url}: {problem}. "
            f"Fix that and {resume_advice()}."
        )
        self.give_up(fault)
        raise UserError(fault)

    def give_up(self, fault: str) -> None:
        """Fail the requests that wait for weights, since none will come."""

        async def fail() -> None:
            self._fault = fault
            self.open.set()

        self.client.run(fail())

    def close(self) -> None:
        """Unload all versions from the server, and remove their files."""
        self.client.run(self._make_current(None))
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    async def acquire(self) -> ServedVersion:
        """Return the version for a new request; wait while weights are replaced."""
        await self.open.wait()
        if self._fault is not None or self.current is None:
            raise UserError(self._fault or "the server was sent no weights yet")
        self.current.users += 1
        return self.current

    @property
    def is_loading(self) -> bool:
        """Whether the server writes no tokens because it loads weights; before that, requests come to their end."""
        return not self.open.is_set() and not (self.current is not None and self.current.users)

    def release(self, served: ServedVersion) -> None:
        """Signal that a request has ended; the last one of an old version drops the version."""
        served.users -= 1
        if served in self._old and not served.users:
            self._old.remove(served)
            task = asyncio.ensure_future(self._drop_version(served))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def ensure_served(self, since: float | None) -> None:
        """Wait until the server is healthy and has the current version, which a restarted server does not."""
        clock = asyncio.get_running_loop().time
        async with self._restoring:
            # Hundreds of turns start at the same time.
            if since is None and clock() - self._healthy_at < CHECK_VALID_SECONDS:
                return
            # A refusal means another restart since the version was loaded.
            await self.client.retry_until_answered(self._restore_version, since, again=(RequestFailed, RequestRefused))
            self._healthy_at = clock()

    async def _load_weights(self, served: ServedVersion) -> tuple[list[int], list[float]]:
        """Have the server load new weights; return the tokens and log-probs of a probe."""
        await self.client.until_healthy()
        if self.transport.drains:
            if self._fault is None:  # else nothing would set it again
                self.open.clear()
            while self.current is not None and self.current.users:
                await asyncio.sleep(0.02)
        await self.transport.put(self.client, served)
        if not await self.transport.holds(self.client, served):
            raise RequestFailed("the server does not list the weights that it loaded")
        ids, logps = await ask_probe(self.client, served.name, self._vocabulary, self._temperature)
        served.top_logps = ids, await top_logps_of(self.client, served.name, ids)
        if self._image_probe is not None:
            served.with_image = await self._image_probe.ask(self.client, served.name)
        return ids, logps

    async def _restore_version(self) -> None:
        """Send the current version again where the server has lost it."""
        served = self.current
        if served is None or not self.open.is_set() or await self.transport.holds(self.client, served):
            return
        logger.warning("warning: %s was restarted; sending version %d again", self.client.url, served.version)
        name, _ = await served_base(self.client, self._base.config.name_or_path)
        await self._detect_temperature(name)
        await self.transport.put(self.client, served)
        ids, before = served.top_logps
        apart = (torch.tensor(await top_logps_of(self.client, served.name, ids)) - torch.tensor(before)).abs()
        if not agrees(float(apart.mean()), float(apart.max()), exact=bool(self._exact)):
            raise UserError(self._other_weights(float(apart.mean())))

    async def _detect_temperature(self, name: str) -> None:
        """Find out at which temperature the server reports log-probs; it may be another after a restart."""
        if self._temperature == 1:
            return
        applied = await applies_temperature(self.client, name, self._vocabulary)
        self._logps_temperature = self._temperature if applied else 1.0
        if not applied:
            warn_once(NO_TEMPERATURE % (self.client.url, self._temperature))

    async def _make_current(self, new: ServedVersion | None) -> None:
        """Make a version the current one, drop unused old ones, and let requests use it."""
        if self.current is not None:
            self._old.append(self.current)
        self.current = new
        for served in [old for old in self._old if not old.users]:
            self._old.remove(served)
            await self._drop_version(served)
        if new is not None:
            self.open.set()

    async def _drop_version(self, served: ServedVersion) -> None:
        """Unload a version and then remove its folder, which the server may read until then."""
        if not served.folder.exists():
            return
        try:
            await self.transport.drop(self.client, served)
        except RequestFailed as error:
            logger.warning("warning: %s is left behind: %s", served.folder, error)
            return
        shutil.rmtree(served.folder, ignore_errors=True)

    def _logp_comparison(self, ids: list[int], logps: list[float], *, adapted: bool) -> Callable[[nn.Module], Any]:
        """Return a function that compares a model, with or without its adapter, with the server's log-probs."""
        return partial(difference, ids=ids, reported_logps=logps, temperature=self._logps_temperature, adapted=adapted)

    def _within_limit(self, mean: float, largest: float) -> bool:
        """Whether a difference is within the limit; the first one decides which limit later ones have."""
        if self._exact is None:
            self._exact = self._dtype == torch.float32 and agrees(mean, largest, exact=True)
            if self._dtype == torch.float32 and not self._exact and agrees(mean, largest, exact=False):
                warn_once(
                    f"the server's log-probs differ by up to {largest:.2g} from the trainer's, which computes in "
                    "float32: it serves in another precision (vllm.dtype: float32 would make them equal), or holds "
                    "what an earlier run sent (restart it)"
                )
        if agrees(mean, largest, exact=self._exact):
            return True
        if self._quantised:
            warn_once(f"log-probs of the server differ by {mean:.2g} on average from those of the quantised base here")
        return self._quantised

    def _apart_after_image(self, answer: tuple[list[int], list[float]] | None, *, adapted: bool) -> float | None:
        """Return the mean difference of log-probs after an image if it is beyond the limit, else None."""
        if self._image_probe is None or answer is None:
            return None
        temperature, exact = self._logps_temperature, bool(self._exact)
        mean, largest = self.on_model(self._image_probe.comparison(*answer, temperature, adapted=adapted))
        return None if self._quantised or self._image_probe.agrees(mean, largest, exact=exact) else mean

    def _other_weights(self, mean: float, after: str = ":") -> str:
        return (
            f"the server at {self.client.url} computes with other weights{after} its log-probs differ by {mean:.3g} on "
            "average from those of base_model. Restart it with `upweight vllm-serve`."
        )
