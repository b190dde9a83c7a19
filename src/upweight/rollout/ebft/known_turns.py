"""Conversations whose other side is known: the policy writes the assistant's turns, all other messages stand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from upweight.rollout.episodes.token_stream import TokenStream, completion_of
from upweight.types import Generator, Group, Sampling

Talks = list[tuple[int, Group, list[TokenStream]]]  # place of a group in the rollout, and its conversations


@dataclass(frozen=True)
class KnownTurns:
    """Fills groups turn by turn. A row's `truth_ids` has the true turns and, between them, what others said."""

    generator: Generator | None  # None where another process samples
    end: int | None  # token that closes a turn which was cut

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        assert self.generator is not None, "this process does not sample"
        found = self.generator.generate([group.prompt_ids for group in groups], count, sampling)
        talks: Talks = []
        for place, (group, completions) in enumerate(zip(groups, found, strict=True)):
            group.completions = completions
            streams = [TokenStream(group.prompt_ids) for _ in completions]
            for stream, one in zip(streams, completions, strict=True):
                stream.append_sampled(one)
            talks.append((sampling.first + place, group, streams))
        turn = 0
        while talks := [talk for talk in talks if turn < len(_replies(talk[1]))]:
            self._go_on(talks, turn, sampling)
            turn += 1
        for place in range(len(groups)):
            if done is not None:
                done(place)

    def _go_on(self, talks: Talks, turn: int, sampling: Sampling) -> None:
        """One more turn of every conversation, after what others say."""
        assert self.generator is not None
        for _, group, streams in talks:
            for stream, one in zip(streams, group.completions, strict=True):
                closing = [] if one.finished or self.end is None else [self.end]
                stream.append_observation([*closing, *_replies(group)[turn]])
        seeds = [
            int(np.random.SeedSequence((sampling.seed or 0, turn, place, member)).generate_state(1)[0])
            for place, _, streams in talks
            for member in range(len(streams))
        ]
        texts = [stream.ids for *_, streams in talks for stream in streams]
        written = iter(self.generator.generate(texts, 1, replace(sampling, seeds=tuple(seeds))))
        for _, group, streams in talks:
            group.completions = []
            for stream, (one,) in zip(streams, written, strict=False):
                stream.append_sampled(one)
                group.completions.append(completion_of(stream, group, finished=one.finished))


def _replies(group: Group) -> list[list[int]]:
    return group.row["truth_ids"][1::2]
