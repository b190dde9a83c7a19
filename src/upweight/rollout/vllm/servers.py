"""Several vLLM servers of one policy: prompts are distributed, and a lost server is left out."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from upweight.errors import UserError
from upweight.log import logger
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.versions import OnModel, Sending
from upweight.types import Completion, Completions, Done, Prompts, Sampling

# Connects to the server at an address, the second argument being its index in the list, and checks it.
Opens = Callable[[str, int, OnModel | None], VllmServer]
FAILOVER_SECONDS = 20.0  # seconds without an answer after which the other servers take over


class VllmServers:
    """Samples from several servers as from one `VllmServer`; see `types.Generator`."""

    # All servers have to answer at the start. A server that is lost later is left out; at the next sync at which it is
    # healthy, it is checked as at the start, receives the weights, and gets prompts again.

    def __init__(self, urls: Sequence[str], opens: Opens) -> None:
        self._urls, self._opens = list(urls), opens
        self._on_model: OnModel | None = None
        self._lock = threading.Lock()  # a rollout that runs ahead may lose a server during a sync
        self._live: dict[str, VllmServer] = {}
        self._lost: dict[str, VllmServer] = {}
        for url in urls:
            self._connect(url)

    def generate(self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None) -> Completions:
        completions_by_prompt: Completions = [[] for _ in prompts]
        requests: dict[Future[Completions], tuple[str, list[int]]] = {}
        arriving = threading.Lock()

        def arrived(share: list[int], index: int, completions: list[Completion]) -> None:
            with arriving:
                completions_by_prompt[share[index]] = completions
                if done is not None:
                    done(share[index], completions)

        def distribute(indices: Iterable[int], pool: ThreadPoolExecutor) -> None:
            """Give every server a share of the prompts, about equal in number and in tokens."""
            live = self._live_servers()
            longest_first = sorted(indices, key=lambda index: -len(prompts[index]))
            for number, (url, server) in enumerate(live.items()):
                if share := sorted(longest_first[number :: len(live)]):
                    ids = [prompts[index] for index in share]
                    images = tuple(sampling.images[index] for index in share) if sampling.images else ()
                    of_share = replace(sampling, images=images)
                    work = pool.submit(server.generate, ids, count, of_share, partial(arrived, share))
                    requests[work] = url, share

        with ThreadPoolExecutor(2 * len(self._urls), "vllm-servers") as pool:
            distribute(range(len(prompts)), pool)
            while requests:
                for work in wait(requests, return_when=FIRST_COMPLETED).done:
                    url, share = requests.pop(work)
                    try:
                        work.result()
                    except UserError as error:
                        self._mark_lost(url, error)
                        distribute([index for index in share if not completions_by_prompt[index]], pool)
        return completions_by_prompt

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return all(server.reads_images for server in self._live_servers().values())

    def sync(self, version: int) -> None:
        with self._lock:
            lost = dict(self._lost)
        for url in [url for url, server in lost.items() if server.health() is None]:
            try:
                self._connect(url)
                logger.warning("%s is back", url)
            except UserError as error:
                logger.warning("warning: %s answers, but cannot be used: %s", url, error)
        behind = {url: server for url, server in self._live_servers().items() if server.version() != version}
        sent: dict[str, Sending | None] = {}  # None where it has to be repeated
        written: Path | None = None  # the weights are written once
        try:
            for url, server in behind.items():
                try:
                    sent[url] = sending = server.weights.send(version, written)
                    written = sending[0].folder
                except (OSError, SafetensorError):
                    sent[url] = None
            for url, server in behind.items():
                try:
                    server.weights.publish(version, sent[url])
                except UserError as error:
                    self._mark_lost(url, error)
        except BaseException as error:
            for server in behind.values():  # requests to them wait for weights that will not come
                server.weights.give_up(str(error) or type(error).__name__)
            raise

    def version(self) -> int:
        return min(server.version() for server in self._live_servers().values())

    def require_room(self, prompt: int, new: int) -> None:
        for server in self._live_servers().values():
            server.require_room(prompt, new)

    def on_model(self, call: OnModel) -> None:
        self._on_model = call
        for server in self._live_servers().values():
            server.on_model(call)

    def close(self) -> None:
        for server in self._live_servers().values():
            server.close()

    def _connect(self, url: str) -> None:
        server = self._opens(url, self._urls.index(url), self._on_model)
        server.client.timeout = FAILOVER_SECONDS
        with self._lock:
            self._live[url] = server
            self._lost.pop(url, None)

    def _live_servers(self) -> dict[str, VllmServer]:
        with self._lock:
            return dict(self._live)

    def _mark_lost(self, url: str, error: UserError) -> None:
        """Leave a server out; raise where no other is left."""
        with self._lock:
            if url in self._live:
                self._lost[url] = self._live.pop(url)
            if not self._live:
                raise error
        logger.warning("warning: going on without %s: %s", url, error)
