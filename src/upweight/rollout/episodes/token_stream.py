"""The tokens of one rollout in order: the prompt, what the policy sampled, and the observations in between."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from upweight.data.raw_row import common_start
from upweight.types import Completion, Group, ImageRef

Images = tuple[ImageRef, ...] | None


@dataclass
class Segment:
    """One token sequence with its prompt; sampled tokens carry a log-prob and a policy version."""

    ids: list[int]
    sampled: list[bool]
    logps: list[float]  # NaN where the sampler's is not known
    versions: list[int | None]
    images: Images = None  # None: those of the prompt's row
    routes: NDArray[np.int16] | None = None  # the experts of all tokens up to the last turn, -1 where not known

    @staticmethod
    def of(prompt: Sequence[int], images: Images = None) -> "Segment":
        count = len(prompt)
        return Segment(list(prompt), [False] * count, [0.0] * count, [None] * count, images)

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first sampled token."""
        return self.sampled.index(True) if True in self.sampled else len(self.ids)

    def append(self, ids: Sequence[int], logps: list[float], versions: Sequence[int | None], *, sampled: bool) -> None:
        self.ids += ids
        self.logps += logps
        self.versions += versions
        self.sampled += [sampled] * len(ids)

    def take_routes(self, routes: NDArray[np.int16]) -> None:
        """Store the experts of a turn and of all before it; those of a token are those of its first forward."""
        if self.routes is not None:
            known = np.flatnonzero(self.routes[:, 0, 0] >= 0)
            routes = routes.copy()
            routes[known] = self.routes[known]
        self.routes = routes

    def completion(self, start: int, *, finished: bool, stop: int | None = None) -> Completion:
        """Return the tokens from `start` to `stop`; observations get the oldest version of the sampled tokens."""
        oldest = min((version for version in self.versions if version is not None), default=0)
        versions = [oldest if version is None else version for version in self.versions[start:stop]]
        ids, logps, sampled = self.ids[start:stop], self.logps[start:stop], self.sampled[start:stop]
        known = [] if any(map(math.isnan, logps)) else logps
        routes = self._routes(start + len(ids))
        return Completion(ids, known, versions, finished, sampled, images=self.images, routes=routes)

    def _routes(self, length: int) -> NDArray[np.int16] | None:
        """Return the experts of so many tokens, those after the last turn being unknown."""
        if self.routes is None:
            return None
        missing = max(0, length - len(self.routes))
        return np.pad(self.routes[:length], ((0, missing), (0, 0), (0, 0)), constant_values=-1)


class TokenStream:
    """The segments of one rollout. The last one grows; each restart of the history ends the one before it."""

    def __init__(self, prompt: Sequence[int], images: Images = None) -> None:
        self.prompt = prompt
        self.segments = [Segment.of(prompt, images)]

    @property
    def ids(self) -> list[int]:
        """The tokens that the next turn continues."""
        return self.segments[-1].ids

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images that these tokens hold."""
        return self.segments[-1].images or ()

    @property
    def length(self) -> int:
        """The number of tokens beyond the prompt."""
        return len(self.ids) - len(self.prompt)

    def append_sampled(self, turn: Completion) -> None:
        logps = turn.logps or [math.nan] * len(turn.ids)
        self.segments[-1].append(turn.ids, logps, turn.versions, sampled=True)
        if turn.routes is not None:
            self.segments[-1].take_routes(turn.routes)

    def append_observation(self, ids: Sequence[int], images: tuple[ImageRef, ...] = ()) -> None:
        """Append what the policy reads between two of its turns."""
        last = self.segments[-1]
        last.append(ids, [0.0] * len(ids), [None] * len(ids), sampled=False)
        last.images = last.images if last.images is None else last.images + images

    def restart(self, prompt: Sequence[int], images: Images = None) -> None:
        """Begin a new segment with a history that the chat template rendered differently."""
        self.segments.append(Segment.of(prompt, images))


def shared_prompt(streams: Sequence[TokenStream]) -> list[int]:
    """Return the longest common prefix of the prompts of all segments of a group."""
    return common_start([segment.ids[: segment.prompt_length] for stream in streams for segment in stream.segments])


def build_completion(stream: TokenStream, group: Group, *, finished: bool) -> Completion:
    """Return a rollout after its group's prompt; each earlier segment ends with its last sampled token."""
    start = len(group.prompt_ids)
    *earlier, last = stream.segments
    completion = last.completion(start, finished=finished)
    for segment in earlier:
        stop = len(segment.sampled) - segment.sampled[::-1].index(True)
        completion.earlier.append(segment.completion(start, finished=True, stop=stop))
    return completion
