"""Conversations whose user turns come from the data, while the policy samples the assistant turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from upweight.rollout.episodes.token_stream import TokenStream, completion_of
from upweight.types import Generator, Group, Sampling

Conversations = list[tuple[int, Group, list[TokenStream]]]  # a group's number in the seed, and its token streams


@dataclass(frozen=True)
class KnownTurns:
    """Fills groups turn by turn. A row's `truth_ids` alternates the true turns and the messages between them."""

    generator: Generator | None  # None where another process samples
    end: int | None  # token that closes a turn which hit the length limit

    def __call__(
        self, groups: Sequence[Group], count: int, sampling: Sampling, done: Callable[[int], None] | None
    ) -> None:
        assert self.generator is not None, "this process does not sample"
        by_prompt = self.generator.generate([group.prompt_ids for group in groups], count, sampling)
        conversations: Conversations = []
        for place, (group, completions) in enumerate(zip(groups, by_prompt, strict=True)):
            group.completions = completions
            streams = [TokenStream(group.prompt_ids) for _ in completions]
            for stream, completion in zip(streams, completions, strict=True):
                stream.append_sampled(completion)
            conversations.append((sampling.first + place, group, streams))
        turn = 0
        while conversations := [entry for entry in conversations if turn < len(_replies(entry[1]))]:
            self._sample_turn(self.generator, conversations, turn, sampling)
            turn += 1
        for place in range(len(groups)):
            if done is not None:
                done(place)

    def _sample_turn(self, generator: Generator, conversations: Conversations, turn: int, sampling: Sampling) -> None:
        """Append the next known messages to every conversation and sample one more turn of each."""
        for _, group, streams in conversations:
            for stream, completion in zip(streams, group.completions, strict=True):
                closing = [] if completion.finished or self.end is None else [self.end]
                stream.append_observation([*closing, *_replies(group)[turn]])
        seeds = [
            int(np.random.SeedSequence((sampling.seed or 0, turn, place, member)).generate_state(1)[0])
            for place, _, streams in conversations
            for member in range(len(streams))
        ]
        prompts = [stream.ids for *_, streams in conversations for stream in streams]
        sampled = iter(generator.generate(prompts, 1, replace(sampling, seeds=tuple(seeds))))
        for _, group, streams in conversations:
            group.completions = []
            for stream, (completion,) in zip(streams, sampled, strict=False):
                stream.append_sampled(completion)
                group.completions.append(completion_of(stream, group, finished=completion.finished))


def _replies(group: Group) -> list[list[int]]:
    return group.row["truth_ids"][1::2]
