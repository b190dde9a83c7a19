"""The tokens of one rollout in order: what was given, what the policy wrote, what it was told in between."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from upweight.data.raw_row import common_start
from upweight.types import Completion, Group


@dataclass
class Segment:
    """One sequence: tokens from the first of the prompt on, and of those the policy wrote log-prob and version."""

    ids: list[int]
    sampled: list[bool]
    logps: list[float]  # NaN where the sampler's is not known
    versions: list[int | None]

    @staticmethod
    def of(prompt: Sequence[int]) -> "Segment":
        count = len(prompt)
        return Segment(list(prompt), [False] * count, [0.0] * count, [None] * count)

    @property
    def given(self) -> int:
        """Tokens before the first that the policy wrote."""
        return self.sampled.index(True) if True in self.sampled else len(self.ids)

    def add(self, ids: Sequence[int], logps: Sequence[float], versions: Sequence[int | None], *, sampled: bool) -> None:
        self.ids += ids
        self.logps += logps
        self.versions += versions
        self.sampled += [sampled] * len(ids)

    def completion(self, start: int, *, finished: bool, stop: int | None = None) -> Completion:
        """What stands after `start`; tokens that were told count as old as the oldest that was written."""
        oldest = min((version for version in self.versions if version is not None), default=0)
        versions = [oldest if version is None else version for version in self.versions[start:stop]]
        ids, logps, sampled = self.ids[start:stop], self.logps[start:stop], self.sampled[start:stop]
        return Completion(ids, [] if any(map(math.isnan, logps)) else logps, versions, finished, sampled)


@dataclass
class TokenStream:
    """Stretches of one rollout: the last grows, the others end where the template wrote the history anew."""

    prompt: Sequence[int]
    stretches: list[Segment] = field(init=False)

    def __post_init__(self) -> None:
        self.stretches = [Segment.of(self.prompt)]

    @property
    def ids(self) -> list[int]:
        """What the next turn continues."""
        return self.stretches[-1].ids

    @property
    def length(self) -> int:
        """Tokens beyond the prompt."""
        return len(self.ids) - len(self.prompt)

    def wrote(self, turn: Completion) -> None:
        """A turn of the policy."""
        logps = turn.logps or [math.nan] * len(turn.ids)
        self.stretches[-1].add(turn.ids, logps, turn.versions, sampled=True)

    def told(self, ids: Sequence[int]) -> None:
        """What follows the policy's turn, up to where it writes again."""
        self.stretches[-1].add(ids, [0.0] * len(ids), [None] * len(ids), sampled=False)

    def restart(self, prompt: Sequence[int]) -> None:
        """The history written otherwise: what was written so far stays behind as a sequence of its own."""
        self.stretches.append(Segment.of(prompt))


def shared_prompt(streams: Sequence[TokenStream]) -> list[int]:
    """The beginning that all sequences of a group were given."""
    return common_start([one.ids[: one.given] for stream in streams for one in stream.stretches])


def completion_of(stream: TokenStream, group: Group, *, finished: bool) -> Completion:
    """A rollout after its group's prompt, with its earlier stretches, each up to the last token that was written."""
    start = len(group.prompt_ids)
    *earlier, last = stream.stretches
    whole = last.completion(start, finished=finished)
    for stretch in earlier:
        stop = len(stretch.sampled) - stretch.sampled[::-1].index(True)
        whole.earlier.append(stretch.completion(start, finished=True, stop=stop))
    return whole
