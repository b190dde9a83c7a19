"""Several vLLM servers of one policy: prompts are shared out, and a server that is lost is done without."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError

from upweight.errors import UserError
from upweight.log import logger
from upweight.rollout.vllm.server import VllmServer
from upweight.rollout.vllm.versions import OnModel, Sending
from upweight.types import Completion, Done, Prompts, Sampling

PATIENCE = 20.0  # seconds after which the others take over from a server that does not answer


class Opens(Protocol):
    """Waits for the server at an address and checks it; `number` is its place in the list."""

    def __call__(self, url: str, number: int, on_model: OnModel | None) -> VllmServer: ...


class VllmServers:
    """Talks to several servers as to one; see `types.Generator`.

    All have to be there at the start. One that is lost later is left out; at the next sync at which it is well again,
    it is checked as at the start, sent the weights, and given prompts again.
    """

    def __init__(self, urls: Sequence[str], opens: Opens) -> None:
        self._urls, self._opens = list(urls), opens
        self._on_model: OnModel | None = None
        self._changing = threading.Lock()  # a rollout that runs ahead may lose a server while another is sent weights
        self._well: dict[str, VllmServer] = {}
        self._lost: dict[str, VllmServer] = {}
        for url in urls:
            self._open(url)

    def generate(
        self, prompts: Prompts, count: int, sampling: Sampling, done: Done | None = None
    ) -> list[list[Completion]]:
        """`count` completions for each prompt, in the order of the prompts; `done` hears of each prompt as it ends."""
        found: list[list[Completion]] = [[] for _ in prompts]
        heard = threading.Lock()
        with ThreadPoolExecutor(2 * len(self._urls), "vllm-servers") as pool:

            def ask(server: VllmServer, places: list[int]) -> "Future[object]":
                def arrived(place: int, completions: list[Completion]) -> None:
                    with heard:
                        found[places[place]] = completions
                        if done is not None:
                            done(places[place], completions)

                own = [prompts[place] for place in places]
                return pool.submit(server.generate, own, count, sampling, arrived)

            well = self._healthy()
            shares = _dealt(range(len(prompts)), prompts, list(well))
            asked = {ask(well[url], places): (url, places) for url, places in shares.items()}
            while asked:
                for work in wait(asked, return_when=FIRST_COMPLETED).done:
                    url, places = asked.pop(work)
                    try:
                        work.result()
                    except UserError as error:
                        self._mark_lost(url, error)
                        well = self._healthy()
                        left = _dealt([one for one in places if not found[one]], prompts, list(well))
                        asked |= {ask(well[other], share): (other, share) for other, share in left.items()}
        return found

    def sync(self, version: int) -> None:
        """Have all servers that are well sample from the policy's weights as they are now, as `version`."""
        with self._changing:
            lost = dict(self._lost)
        for url in [url for url, server in lost.items() if server.health() is None]:
            try:
                self._open(url)
                logger.warning("%s is back", url)
            except UserError as error:
                logger.warning("warning: %s answers, but cannot be used: %s", url, error)
        behind = {url: server for url, server in self._healthy().items() if server.version() != version}
        try:
            begun = self._begin(version, behind)
            for url, server in behind.items():
                try:
                    server.weights.publish(version, begun[url])
                except UserError as error:
                    self._mark_lost(url, error)
        except BaseException as error:
            for server in behind.values():  # requests to them wait for weights that will not come
                server.weights.give_up(str(error) or type(error).__name__)
            raise

    def _begin(self, version: int, behind: dict[str, VllmServer]) -> dict[str, Sending | None]:
        """Have servers begin to take the weights, which are written once; None where it has to be tried again."""
        begun: dict[str, Sending | None] = {}
        written: Path | None = None
        for url, server in behind.items():
            try:
                begun[url] = sending = server.weights.send(version, written)
                written = sending[0].folder
            except (OSError, SafetensorError):
                begun[url] = None
        return begun

    def version(self) -> int:
        """The policy version that the next request would be sampled from; -1 before the first sync."""
        return min(server.version() for server in self._healthy().values())

    def health(self) -> str | None:
        """None when all servers are well, else what is wrong."""
        problems = [problem for server in self._healthy().values() if (problem := server.health()) is not None]
        return "; ".join([*problems, *(f"the vLLM server at {url} is lost" for url in self._lost)]) or None

    def require_room(self, prompt: int, new: int) -> None:
        """Raise where a prompt of so many tokens with so many new ones is longer than any of the servers takes."""
        for server in self._healthy().values():
            server.require_room(prompt, new)

    def on_model(self, does: OnModel) -> None:
        """From now on `does` has the policy written and compared: where its weights are spread over ranks."""
        self._on_model = does
        for server in self._healthy().values():
            server.on_model(does)

    def close(self) -> None:
        """Have the servers forget what they were sent; a later sync sends anew."""
        for server in self._healthy().values():
            server.close()

    def _open(self, url: str) -> None:
        server = self._opens(url, self._urls.index(url), self._on_model)
        server.client.timeout = PATIENCE
        with self._changing:
            self._well[url] = server
            self._lost.pop(url, None)

    def _healthy(self) -> dict[str, VllmServer]:
        with self._changing:
            return dict(self._well)

    def _mark_lost(self, url: str, error: UserError) -> None:
        """Go on without a server, while there is another."""
        with self._changing:
            if url in self._well:
                self._lost[url] = self._well.pop(url)
            if not self._well:
                raise error
        logger.warning("warning: going on without %s: %s", url, error)


def _dealt(places: Sequence[int], prompts: Prompts, urls: Sequence[str]) -> dict[str, list[int]]:
    """Places of prompts for each server: as many for each, and about as many tokens."""
    longest_first = sorted(places, key=lambda place: -len(prompts[place]))
    shares = {url: sorted(longest_first[number :: len(urls)]) for number, url in enumerate(urls)}
    return {url: share for url, share in shares.items() if share}
